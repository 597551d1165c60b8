"""Where users let something be written: found once, tried before it is needed, and never fatal."""

import os
import re
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainkit.errors import CheckpointError, ConfigError

__all__ = [
    "Lines",
    "absolute",
    "check_file",
    "check_folder",
    "claim",
    "folder_of_run",
    "giving_up",
    "replace_file",
    "why",
]

_MOST_WAITING = 10_000  # lines that are kept for a disk that takes none
_RUN = re.compile(r"(\d{4}-\d\d-\d\d)_(\d+)", re.ASCII)  # the folder of one run of several


def absolute(path: object, argument: str) -> Path:
    """Return what a user gave as a path, so that a later change of the working directory is none.

    Raises:
        ConfigError: It is no path, or a relative one in a working directory that is gone.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"`{argument}` must be a path, but is {path!r}.")
    given: str | os.PathLike[str] = path
    try:
        return Path(given).absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"`{argument}` is the relative path `{path}`, but the working directory of this "
            "process does not exist any more. Pass an absolute path, or start the program in a "
            "folder that exists."
        ) from None


def check_folder(folder: Path, owner: str) -> None:
    """Make a folder, and try to write a file in it.

    Args:
        folder: An absolute path.
        owner: Who writes there, for the error.

    Raises:
        ConfigError: It cannot be written to; says why.
    """
    trial = folder / f".trainkit-trial-{os.urandom(6).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with trial.open("xb", buffering=0) as file:
                file.write(bytes(4096))  # a full disk may take a name, but no content
                os.fsync(file.fileno())
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise _refusal(folder, owner, error) from error


def check_file(path: Path, owner: str) -> None:
    """Try to write where a file is to be; one that is there stays as it is.

    Args:
        path: An absolute path.
        owner: Who writes there, for the error.

    Raises:
        ConfigError: It cannot be written; says why.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        return  # a pipe or a device
    check_folder(path.parent, owner)
    try:
        if os.path.lexists(path):
            path.open("ab").close()
    except OSError as error:
        raise _refusal(path, owner, error) from error


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
    owner: str,
    give_up: Callable[[], None],
    outcome: str = "nothing more is written there",
) -> Iterator[None]:
    """Warn, and call `give_up`, where nothing can be written inside: training is worth more."""
    try:
        yield
    except OSError as error:
        give_up()
        warnings.warn(
            f"{owner} cannot write: {error}. Training goes on, and {outcome}.", stacklevel=4
        )


def why(path: Path, error: OSError) -> str:
    """Return why `path` cannot be written to, in words."""
    if isinstance(error, IsADirectoryError):
        return f"`{path}` is a folder"
    in_the_way = isinstance(error, FileExistsError | FileNotFoundError | NotADirectoryError)
    for place in (path, *path.parents) if in_the_way else ():
        if os.path.islink(place) and not os.path.exists(place):
            return f"`{place}` is a link to `{os.readlink(place)}`, which does not exist"
        if os.path.isfile(place):
            return f"`{place}` is a file, not a folder"
    return str(error)


def _refusal(path: Path, owner: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{owner} writes to `{path}`, but cannot: {why(path, error)}. Choose another place, or "
        "make this one writable."
    )


def folder_of_run(parent: Path, resume: str | Path | None) -> Path:
    """Return the folder of a run among others in `parent`.

    Where `resume` is "auto" or "must" it is the newest, or `parent` itself where that holds
    checkpoints and no runs; else, or where "auto" finds none, a new one that nobody else gets, such
    as `2026-11-22_1`.

    Raises:
        CheckpointError: "must" finds none.
        ConfigError: A folder cannot be made; says why.
    """
    matches = [_RUN.fullmatch(place.name) for place in parent.glob("*_*") if place.is_dir()]
    runs = sorted((match[1], int(match[2]), match[0]) for match in matches if match)
    if resume in ("auto", "must"):
        if runs or any(parent.glob("checkpoints/step-*")):
            return parent / runs[-1][2] if runs else parent
        if resume == "must":
            raise CheckpointError(
                f'`resume="must"` was given, but `{parent}` holds no run. Use `resume="auto"` to '
                "begin one in this case.",
                path=parent,
            )
    # No name sorts before an older one, whatever the clock of this machine or its time zone says.
    day, number = time.strftime("%Y-%m-%d", time.gmtime()), 1
    if runs and runs[-1][0] >= day:
        day, number = runs[-1][0], runs[-1][1] + 1
    while True:
        folder = parent / f"{day}_{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run came first
            number += 1
        except OSError as error:
            raise _refusal(folder, "`Trainer(output_dir=..., new_run=True)`", error) from error


def replace_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, all of it or nothing, so that a power cut keeps it; an earlier one goes.

    Args:
        path: Where.
        content: The whole, or its pieces in order.

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

    Args:
        path: The file; it is made where it is missing.
        owner: Who writes, for the warning.
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
        """Return the bytes of the file."""
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
