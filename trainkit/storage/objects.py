"""The objects of an address, by `obstore`: the only place that knows the library."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from trainkit.basics.packages import require
from trainkit.errors import CheckpointError

_PART = 1 << 24  # bytes that are sent or asked for at once
_MOST_PARTS = 9_999  # of one object, which S3 limits
_AT_ONCE = 4  # requests
_REQUEST = timedelta(seconds=120)  # for a part
_RETRY = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}


class StorageError(CheckpointError):
    """A storage that does not do what it was asked; names the address and the cause."""


class Objects:
    """The objects below an address such as `s3://bucket/run`, by their names from there on.

    Credentials, region and endpoint are those of the environment (`AWS_ACCESS_KEY_ID`,
    `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, ...).
    All methods raise `StorageError` where the storage cannot be reached or refuses.
    """

    def __init__(self, address: str) -> None:
        require("obstore", f"`{address}`")
        from obstore import exceptions, store

        self.address = address
        self._known: tuple[type[Exception], ...] = (exceptions.BaseError, OSError)
        self._refusals = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        options = {"timeout": _REQUEST, "allow_http": plain}
        with self._asking(""):
            make: Any = store.from_url
            self._store = make(address, client_options=options, retry_config=_RETRY)

    def names(self, prefix: str = "") -> dict[str, int]:
        """Return the names below a prefix that ends a part of the name, with their bytes."""
        import obstore

        with self._asking(prefix):
            listed = [each for batch in obstore.list(self._store, prefix or None) for each in batch]
        return {each["path"]: each["size"] for each in listed}

    def folders(self) -> list[str]:
        """Return the names that have others below them."""
        import obstore

        with self._asking(""):
            listed = obstore.list_with_delimiter(self._store)
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"]]

    def write(self, name: str, content: bytes) -> None:
        """Write an object, whatever was there."""
        self._put(name, content, "overwrite")

    def create(self, name: str, content: bytes) -> str | None:
        """Write an object that must not exist; return its tag, None where it does."""
        try:
            return self._put(name, content, "create")
        except self._refusals:
            return None

    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        """Write an object that must still have this tag; return its new one, None where not."""
        try:
            return self._put(name, content, {"e_tag": tag})
        except self._refusals:
            return None

    def put_file(self, name: str, path: Path) -> None:
        """Write the present bytes of a file, and compare what has arrived with them.

        Raises:
            FileNotFoundError: The file is gone.
        """
        digests: list[bytes] = []
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            part = max(_PART, -(-size // _MOST_PARTS))

            def pieces() -> Iterator[bytes]:
                for begin in range(0, size, part):
                    piece = file.read(min(part, size - begin))
                    digests.append(_md5(piece))
                    yield piece

            content = pieces() if size > part else b"".join(pieces())
            tag = self._put(name, content, "overwrite", part)
        expected = digests[0].hex() if digests else None
        if len(digests) > 1:
            expected = f"{_md5(b''.join(digests)).hex()}-{len(digests)}"
        if tag.strip('"') == expected:
            return
        # No digest: of other storages than S3, or of encrypted buckets.
        if [*map(_md5, self._pieces(name, self.head(name)[1], part))] != digests:
            raise StorageError(
                f"`{self.address}/{name}` is not what was sent to it: it was cut or changed on its "
                "way. It is sent again."
            )

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None where there is none."""
        import obstore

        with suppress(FileNotFoundError), self._asking(name, may_lack=True):
            return bytes(obstore.get(self._store, name).bytes())
        return None

    def fetch(self, name: str, path: Path) -> None:
        """Write an object into a new file."""
        size = self.head(name)[1]
        with path.open("xb") as file:
            for piece in self._pieces(name, size, _PART):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    def head(self, name: str) -> tuple[str, int, datetime]:
        """Return the tag of an object, its bytes, and when it was written by the storage's clock.

        Raises:
            FileNotFoundError: There is none.
        """
        import obstore

        with self._asking(name, may_lack=True):
            meta = obstore.head(self._store, name)
        return str(meta["e_tag"]), meta["size"], meta["last_modified"]

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is removed."""
        import obstore

        for name in names:
            with suppress(FileNotFoundError), self._asking(name, may_lack=True):
                obstore.delete(self._store, name)

    def _put(
        self, name: str, content: Any, mode: str | Mapping[str, str], part: int = _PART
    ) -> str:
        import obstore

        put: Callable[..., Any] = obstore.put
        several = not isinstance(content, bytes)
        with self._asking(name):
            options = {"use_multipart": several, "chunk_size": part, "max_concurrency": _AT_ONCE}
            return str(put(self._store, name, content, mode=mode, **options)["e_tag"])

    def _pieces(self, name: str, size: int, part: int) -> Iterator[bytes]:
        """Yield the content of an object, some parts ahead."""
        import obstore

        def piece(begin: int) -> bytes:
            with self._asking(name):
                end = min(begin + part, size)
                return bytes(obstore.get_range(self._store, name, start=begin, end=end))

        begins = range(0, size, part)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for first in range(0, len(begins), _AT_ONCE):
                yield from pool.map(piece, begins[first : first + _AT_ONCE])

    @contextmanager
    def _asking(self, name: str, *, may_lack: bool = False) -> Iterator[None]:
        """Turn an error of the library into one that names the address and the cause."""
        try:
            yield
        except self._refusals:
            raise
        except self._known as error:
            if may_lack and isinstance(error, FileNotFoundError):
                raise
            text = str(error)
            cause = text.partition("\n")[0].removesuffix(" {")
            if "kind: Timeout" in text:  # which the library tells developers alone
                cause += f": no answer in {_REQUEST.total_seconds():g} s"
            url = f"{self.address}/{name}" if name else self.address
            raise StorageError(
                f"`{url}` cannot be reached or refuses: {cause}. See to the address, the "
                "credentials in the environment and the network."
            ) from error


def _md5(piece: bytes) -> bytes:
    """Return the digest by which S3 tags what it holds."""
    return hashlib.md5(piece, usedforsecurity=False).digest()
