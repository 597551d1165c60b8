"""The manifest: which files a checkpoint has, and their digests. Written last, read first.

Its first line ends with the digest of all that follows that line, so that no byte of the
manifest can change unseen. That line is the same in every version of the format.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainkit.checkpoint.format import codec, strict_json
from trainkit.checkpoint.format.codec import decode
from trainkit.checkpoint.format.names import JSON_SUFFIX, MANIFEST, PACK, TENSOR_SUFFIX, is_allowed
from trainkit.checkpoint.forms import Only, check_form
from trainkit.checkpoint.io.digests import xxh3_128_hexdigest
from trainkit.checkpoint.io.reading import Directory, broken, open_directory, open_file
from trainkit.containers.json_form import MALFORMED
from trainkit.errors import CheckpointError

FORMAT_VERSION = 4
"""The newest version. Written is the least that has what is in the checkpoint: 2 where tensors
are sharded, 3 where one does not lie row by row in memory, 4 with packed files, else 1."""

_MOST = 1e308  # that a float can be
_HEAD = b'{"manifest_xxh3_128": "'
_HEAD_SIZE = len(_HEAD) + 32 + len(b'",\n')


@dataclass(frozen=True, kw_only=True, slots=True)
class FileInfo:
    """What a file must be, and where it is: by itself, or in a pack, from byte `begin` on."""

    bytes: int
    xxh3_128: str  # 32 hexadecimal digits
    pack: str | None = None
    begin: int = 0

    def encode(self) -> dict[str, Any]:
        """Return it for the manifest."""
        location = {} if self.pack is None else {"pack": self.pack, "begin": self.begin}
        return {"bytes": self.bytes, "xxh3_128": self.xxh3_128, **location}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds.

    Of its files, which `files` lists by name without the manifest itself, several may be packed
    into one of the folder, each right behind the one before it.
    """

    format_version: int = 1
    step: int  # updates applied when it was made
    revision: int = 0  # how often this step had been saved before, by the same run
    run_id: str  # which run made it
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    world_size: int  # processes that wrote it
    files: Mapping[str, FileInfo]
    metadata: Mapping[str, Any]  # what the run wrote beside the parts: `{"metrics": {...}}`

    @property
    def is_finite(self) -> bool:
        """Return False where it was made of parameters, or after a loss, that are not finite."""
        return self.metadata.get("finite") is not False

    @property
    def is_resumable(self) -> bool:
        """Return False where it holds the weights of a model alone."""
        return self.metadata.get("weights_only") is not True

    @property
    def age(self) -> tuple[int, int, int]:
        """Return which save of its run it was, 0 where older versions did not say, then the step.

        By it the newest is found, also where the run once went back to an earlier one.
        """
        found = self.metadata.get("saves")
        return (found if type(found) is int else 0), self.step, self.revision

    @property
    def metrics(self) -> dict[str, float]:
        """Return what its evaluation gave, as far as that is numbers."""
        logged = self.metadata.get("metrics")
        values = logged if isinstance(logged, dict) else {}
        return {
            name: value
            for name, value in values.items()
            if type(value) is float or (type(value) is int and abs(value) < _MOST)
        }

    @property
    def size(self) -> int:
        """Return the bytes of all files together."""
        return sum(info.bytes for info in self.files.values())

    def sizes(self) -> Counter[str]:
        """Return the names and bytes of the files in the folder, but for the manifest."""
        sizes: Counter[str] = Counter()
        for name, info in self.files.items():
            sizes[info.pack or name] += info.bytes
        return sizes

    def encode(self) -> bytes:
        """Return the content of `manifest.json`."""
        body = {
            "format_version": self.format_version,
            "step": self.step,
            "revision": self.revision,
            "run_id": self.run_id,
            "created": self.created,
            "world_size": self.world_size,
            "files": {name: info.encode() for name, info in self.files.items()},
            "metadata": codec.encode_inline(dict(self.metadata), "metadata"),
        }
        rest = strict_json.dump(body, indent=1).removeprefix(b"{\n") + b"\n"
        content = _HEAD + xxh3_128_hexdigest(rest).encode() + b'",\n' + rest
        if len(content) > strict_json.LARGEST:
            raise CheckpointError(
                f"`metadata` makes a manifest of {len(content)} bytes, but at most "
                f"{strict_json.LARGEST} are allowed. Put large values into a part."
            )
        return content

    @classmethod
    def decode(cls, content: bytes, path: Path) -> "Manifest":
        """Return the manifest with this content; `path` is the checkpoint's folder, for errors."""
        rest = content[_HEAD_SIZE:]
        head = _HEAD + xxh3_128_hexdigest(rest).encode() + b'",\n'
        if content[:_HEAD_SIZE] != head:
            raise broken(
                path, MANIFEST, ": it is cut or has been changed (its own digest is wrong)"
            )
        try:
            return _build(strict_json.parse(content), path)
        except CheckpointError:
            raise
        except MALFORMED as error:
            why = str(error) or type(error).__name__
            raise broken(path, MANIFEST, f": {why}") from error


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint in the folder `path`; nothing else is checked."""
    with open_directory(path) as directory:
        return read_manifest_in(directory, path)


def read_manifest_in(directory: Directory, path: Path) -> Manifest:
    """Return the manifest in the open folder `directory`, as `read_manifest` does."""
    with open_file(directory, MANIFEST, path) as file:
        if file.size > strict_json.LARGEST:
            limit = strict_json.LARGEST
            raise broken(
                path, MANIFEST, f": it has {file.size} bytes, more than the limit of {limit}"
            )
        content = file.read(file.size)
    return Manifest.decode(content, path)


def _build(body: Any, path: Path) -> Manifest:
    check_form(body, {"format_version": int})
    version = body["format_version"]
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint `{path}` has version {version} of the format, but this version of "
            f"trainkit reads up to {FORMAT_VERSION}. Install a newer trainkit.",
            path=path,
            file=MANIFEST,
        )
    check_form(body, _FORM)
    files = {name: FileInfo(**info) for name, info in body["files"].items()}
    _check_files(files)
    metadata = decode(body["metadata"], {})
    check_form(metadata, {}, "metadata")  # an object of JSON may stand for another value
    known = {one.name for one in fields(Manifest)}
    told = {name: body[name] for name in body if name in known}
    return Manifest(**told | {"files": files, "metadata": metadata})


_FORM = {
    "step": int,
    "revision": int,
    "run_id": str,
    "created": str,
    "world_size": int,
    "files": {str: Only({"bytes": int, "xxh3_128": str, "pack?": str, "begin?": int})},
    "metadata": {},
}


def _check_files(files: Mapping[str, FileInfo]) -> None:
    """Check names, digests, and that packed files follow each other: no byte is of none or two."""
    if len({name.lower() for name in files}) != len(files):
        raise ValueError("two files have names that differ only in case")
    for name, info in files.items():
        if not is_allowed(name) or name.lower() == MANIFEST:
            raise ValueError(f"no file of a checkpoint may be called {name[:200]!r}")
        if not name.endswith((TENSOR_SUFFIX, JSON_SUFFIX)):
            raise ValueError(f"the file {name!r} is neither safetensors nor JSON")
        if len(info.xxh3_128) != 32 or set(info.xxh3_128) - set("0123456789abcdef"):
            raise ValueError(f"the digest of {name!r} is not 32 hexadecimal digits")
        if info.pack not in (None, PACK):
            raise ValueError(f"{name!r} is packed into another file than {PACK!r}")
    end = 0
    for info in sorted((f for f in files.values() if f.pack), key=lambda f: (f.begin, f.bytes)):
        if info.begin != end:
            raise ValueError(f"a packed file begins at {info.begin}, but the last ends at {end}")
        end += info.bytes
