"""One program at a time writes to a folder, or to a file of its own in one (rule 24)."""

import json
import os
import socket
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self
from weakref import WeakSet, WeakValueDictionary

from trainkit.basics.outputs import unwritable
from trainkit.basics.systems import ITSELF, after_fork
from trainkit.errors import CheckpointError

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MOST_BYTES = 4096
_held: "WeakSet[RunLock]" = WeakSet()
_shared: "WeakValueDictionary[Path, RunLock]" = WeakValueDictionary()


class RunLock:
    """Holds a directory for this process; reading what is in it does not need that.

    The system releases the lock when the process ends, however it ends; processes forked by it
    do not hold on to it. The file `.lock` stays, and says who holds it or held it last.

    Args:
        directory: The run's directory; it is made where it is missing.
        part: A file or folder in it that is locked alone, instead of all that is in it.
        advice: What whoever finds it locked can do instead of waiting.
    """

    def __init__(
        self, directory: Path, part: str = "", *, advice: str = "choose another `output_dir`"
    ) -> None:
        self.directory = directory
        self._advice = advice
        self._locked = directory / part if part else directory
        self._path = directory / (f".{part}.lock" if part else ".lock")
        self._descriptor = -1
        self._identity = (-1, -1)  # device and inode of the directory
        self._signature = b""  # the content of the file

    @classmethod
    def shared(cls, directory: Path, part: str = "", *, advice: str) -> "RunLock":
        """Return a lock that is held as long as anybody in this process refers to it."""
        lock = cls(directory.resolve(), part, advice=advice)
        known = _shared.get(lock._path)
        if known is None or known._descriptor < 0:  # which a fork has let go
            _shared[lock._path] = known = lock.acquire()
        return known

    def acquire(self) -> Self:
        """Take the lock."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | ITSELF, 0o644)
            try:
                self._lock(descriptor)
                self._identity = _identity(self.directory)
                self._signature = _sign(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            advice = f"{self._advice[0].upper()}{self._advice[1:]}"
            raise unwritable(self.directory, error, advice) from error
        self._descriptor = descriptor
        _held.add(self)
        return self

    def check(self) -> None:
        """Make sure that the path of the directory still leads to the one that was locked.

        One that was removed meanwhile is made and locked anew.
        """
        try:
            if _identity(self.directory) == self._identity:
                return
        except (FileNotFoundError, NotADirectoryError):
            with suppress(FileExistsError, NotADirectoryError):  # another one has come meanwhile
                self.directory.mkdir(parents=True)
                warnings.warn(
                    f"`{self.directory}` was removed while a run writes to it. It is made anew for "
                    "checkpoints; what loggers wrote and go on to write is lost.",
                    stacklevel=2,
                )
                self.release()
                self.acquire()
        try:
            if self._path.read_bytes() == self._signature:
                return  # some file systems give a file another number after a while
        except OSError:
            pass
        raise CheckpointError(
            f"`{self.directory}` is another folder than the one that this run began to write to, "
            "which was moved away. Nothing is saved in it. Move the first one back, and go on "
            "from its newest checkpoint.",
            path=self.directory,
        )

    def release(self) -> None:
        """Give the lock back, if this process holds it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.discard(self)

    def __del__(self) -> None:
        if _held is not None:  # else Python is ending: it has cleared this module
            self.release()

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self, descriptor: int) -> None:
        try:
            if fcntl is None:
                raise OSError("this system has no `flock`")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"`{self._locked}` is locked by {_holder(descriptor)}, which writes there. Wait "
                f"for that run to end, or {self._advice}.",
                path=self.directory,
            ) from None
        except OSError as error:
            warnings.warn(
                f"The file system of `{self._locked}` has no locks ({error}). Make sure that no "
                "other run writes there.",
                stacklevel=4,
            )


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _sign(descriptor: int) -> bytes:
    """Write who holds a lock into its file, and return that."""
    since = datetime.now(UTC).isoformat()
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    content = json.dumps(owner).encode()
    os.ftruncate(descriptor, 0)
    os.write(descriptor, content)
    return content


def _holder(descriptor: int) -> str:
    try:
        owner = json.loads(os.read(descriptor, _MOST_BYTES))
        pid, host, since = (str(owner[name])[:64] for name in ("pid", "host", "since"))
        return f"process {pid} on host {host} since {since.partition('.')[0]} UTC"
    except (LookupError, RecursionError, TypeError, ValueError):
        return "another process"  # which has not signed yet


def _let_go_in_child() -> None:
    # A worker that outlives a killed run must not keep its lock.
    for lock in list(_held):
        lock.release()


after_fork(_let_go_in_child)
