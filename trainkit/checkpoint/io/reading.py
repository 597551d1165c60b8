"""Read the files of a checkpoint without following links, blocking, or trusting a length."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TypeAlias

from trainkit.basics.systems import AT_ONCE, IN_FOLDERS, ITSELF
from trainkit.checkpoint.io.digests import xxh3_128
from trainkit.errors import CheckpointCorrupt

Directory: TypeAlias = int | Path
"""An open folder; on Windows, which opens none, its path."""

_CHUNK = 1 << 19  # bytes read at once: they are hashed while the processor still has them
_AHEAD = 1 << 24  # bytes that the system is asked to have in memory before they are read


def broken(path: Path, file: str, why: str, errno: int | None = None) -> CheckpointCorrupt:
    """Return the error on a file of the checkpoint `path`; `why` follows its name."""
    text = f"The checkpoint `{path}` is broken: `{file}`{why}."
    return CheckpointCorrupt(text, path=path, file=file, errno=errno)


@contextmanager
def open_directory(path: Path) -> Iterator[Directory]:
    """Open the folder `path`, which must not be a link; close it at the end."""
    descriptor = -1
    try:
        if IN_FOLDERS:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | ITSELF)
        elif path.is_symlink() or not path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(path))
    except OSError as error:
        if path.is_symlink():
            text = f"`{path}` is a link. Pass the folder itself, not a link to it."
        elif isinstance(error, FileNotFoundError):
            text = f"There is no checkpoint `{path}`."
        else:
            text = f"The checkpoint `{path}` cannot be opened: {error}."
        raise CheckpointCorrupt(text, path=path, errno=error.errno) from error
    try:
        yield descriptor if IN_FOLDERS else path
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def names_in(directory: Directory) -> list[str]:
    """Return the names in an open folder."""
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def open_file(directory: Directory, name: str, path: Path) -> Iterator["HashedFile"]:
    """Open the ordinary file `name` in the open folder `directory`; close it at the end."""
    descriptor = -1
    path_or_name, at = (name, directory) if isinstance(directory, int) else (directory / name, None)
    try:
        # Looked at before it is opened: opening a pipe waits, and opening a device may act.
        _check_is_ordinary(os.stat(path_or_name, dir_fd=at, follow_symlinks=False), name, path)
        descriptor = os.open(path_or_name, os.O_RDONLY | ITSELF | AT_ONCE, dir_fd=at)
        status = os.fstat(descriptor)
        _check_is_ordinary(status, name, path)
        yield HashedFile(descriptor, status.st_size, name, path)
    except FileNotFoundError as error:
        raise broken(path, name, " is missing", error.errno) from error
    except OSError as error:
        raise broken(path, name, f" cannot be read: {error}", error.errno) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _check_is_ordinary(status: os.stat_result, name: str, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "not an ordinary file"
        raise broken(path, name, f" is {kind}")


def _read_into(target: memoryview, descriptor: int, offset: int) -> int:
    """Read what is at an offset of a file, at most as much as fits; return how many bytes came."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [target], offset)
    os.lseek(descriptor, offset, os.SEEK_SET)
    data = os.read(descriptor, len(target))
    target[: len(data)] = data
    return len(data)


class HashedFile:
    """An open file whose content is hashed as it is read, from its beginning to its end."""

    def __init__(self, descriptor: int, size: int, name: str, path: Path) -> None:
        self.size = size  # bytes
        self.name = name
        self.path = path
        self._descriptor = descriptor
        self._begin, self._within = 0, ""  # in the file that it is packed into
        self._place = 0  # of the next byte to be hashed
        self._asked = 0  # up to where the system was asked to read ahead
        self._hash = xxh3_128()

    def narrow(self, name: str, begin: int, size: int) -> None:
        """Be only the file that is packed into this one from `begin` on; before all reading."""
        self._begin, self._within = begin, f" in `{self.name}`"
        self.name, self.size = name, max(0, min(size, self.size - begin))

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes, hashing them while the disk brings more."""
        for begin in range(0, len(target), _CHUNK):
            chunk = target[begin : begin + _CHUNK]
            if self._asked < self._place + _AHEAD < self.size:
                self._ask()
            self.read_at(self._place, chunk)
            self._place += len(chunk)
            self._hash.update(chunk)

    def _ask(self) -> None:
        with suppress(AttributeError, OSError):  # macOS has it not; it is advice
            offset = self._begin + self._asked
            os.posix_fadvise(self._descriptor, offset, _AHEAD, os.POSIX_FADV_WILLNEED)
        self._asked += _AHEAD

    def read_at(self, begin: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `begin` on, without hashing them."""
        left = target
        while left:
            offset = self._begin + begin + len(target) - len(left)
            count = _read_into(left, self._descriptor, offset)
            if count == 0:
                raise self.broken("it is cut")
            left = left[count:]

    def skip(self, size: int) -> None:
        """Hash the next `size` bytes."""
        buffer = memoryview(bytearray(min(_CHUNK, size)))
        for begin in range(0, size, _CHUNK):
            self.read_into(buffer[: size - begin])

    def skip_rest(self) -> Self:
        """Hash what has not been read yet."""
        self.skip(self.size - self._place)
        return self

    def digest(self) -> str:
        """Return the xxh3-128 of all that was read, in hexadecimal."""
        return self._hash.hexdigest()

    def check_size(self, expected: int) -> None:
        if self.size != expected:
            raise self.broken(f"it has {self.size} bytes, but {expected} were written")

    def check_digest(self, expected: str) -> None:
        if self.digest() != expected:
            raise self.broken(f"its content has changed (digest {self.digest()}, not {expected})")

    def broken(self, why: str) -> CheckpointCorrupt:
        """Return the error that says why this file cannot be used."""
        return broken(self.path, self.name, f"{self._within}: {why}")
