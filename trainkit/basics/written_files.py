"""Files that a run writes beside its checkpoints: one writer each, and never fatal."""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainkit.basics.outputs import check_folder, refusal
from trainkit.errors import ConfigError

_MOST_WAITING = 10_000  # lines that are kept for a disk that takes none


def check_file(path: Path, owner: str) -> None:
    """Try to write where a file is to be; one that is there stays as it is."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        return  # a pipe or a device
    check_folder(path.parent, owner)
    try:
        if os.path.lexists(path):
            path.open("ab").close()
    except OSError as error:
        raise refusal(path, owner, error) from error


def claim(taken: dict[Path, str], path: Path, owner: str) -> None:
    """Note in `taken` who writes a file or folder; raise ConfigError where another does already."""
    other = taken.setdefault(path.resolve(), owner)
    if other != owner:
        raise ConfigError(
            f"{other} and {owner} would both write to `{path}`. Leave one of them out, or give it "
            "a place of its own."
        )


@contextmanager
def giving_up(
    owner: str, give_up: Callable[[], None], outcome: str = "nothing more is written there"
) -> Iterator[None]:
    """Warn, and call `give_up`, where nothing can be written inside: training is worth more."""
    try:
        yield
    except OSError as error:
        give_up()
        warnings.warn(
            f"{owner} cannot write: {error}. Training goes on, and {outcome}.", stacklevel=4
        )


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, all of it or nothing, so that a power cut keeps it; an earlier one goes.

    Raises:
        OSError: It cannot be written; the earlier one is as it was.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
        raise


class Lines:
    """Appends lines to a file, each at once; a disk that takes none warns, and ends no training.

    What could not be written is tried again with the next line.
    """

    def __init__(self, path: Path, owner: str) -> None:
        self._path = path
        self._owner = owner
        self._file = path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._warned = False

    def write(self, line: str) -> None:
        """Write a line, and those that wait."""
        self._waiting.append(line.encode() + b"\n")
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._owner} cannot write to `{self._path}` any more: "
                    f"{error.strerror or error}. Training goes on; its lines are kept, and "
                    "written as soon as that works.",
                    stacklevel=2,
                )

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Let what was written survive a power cut."""
        with suppress(OSError):  # a pipe has no disk
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; says what was never written."""
        with suppress(OSError):  # which some file systems say only now
            self._file.close()
        if self._waiting:
            warnings.warn(
                f"`{self._path}` lacks the last {len(self._waiting)} lines of {self._owner}, "
                "which could not be written.",
                stacklevel=2,
            )

    def _append(self, line: bytes) -> None:
        """Write a line whole or not at all."""
        written = self._file.write(line)
        if written == len(line):
            return
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            with suppress(OSError):  # a pipe has no length
                os.truncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            raise
