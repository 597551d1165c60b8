"""One run at a time writes to a directory."""

import fcntl
import os
import socket
import sys
import warnings
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainkit.checkpoint.format import strict_json
from trainkit.checkpoint.io import files
from trainkit.checkpoint.listing import unwritable
from trainkit.errors import CheckpointError

__all__ = ["RunLock"]

_NAME = ".lock"
_MOST_BYTES = 4096
_held: "weakref.WeakSet[RunLock]" = weakref.WeakSet()


class RunLock:
    """Holds a directory for this process; reading checkpoints does not need it.

    The system releases the lock when the process ends, however it ends; processes forked by it
    do not hold on to it. The file `.lock` stays, and says who holds it or held it last.

    Args:
        directory: The run's directory; it is made where it is missing.
        run_id: Told to whoever finds the directory locked.
    """

    def __init__(self, directory: Path, *, run_id: str = "") -> None:
        self.directory = directory
        self.run_id = run_id
        self._descriptor = -1

    def acquire(self) -> Self:
        """Take the lock.

        Raises:
            CheckpointError: Another process holds it, or the directory cannot be written to.
        """
        path = self.directory / _NAME
        try:
            files.make_directories(self.directory)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise unwritable(self.directory, error) from error
        try:
            _lock(descriptor, self.directory)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _held.add(self)
        _sign(descriptor, self.run_id)
        return self

    def release(self) -> None:
        """Give the lock back, if this process holds it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.discard(self)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(
            f"The directory `{directory}` is locked by {_holder(descriptor)}. Wait for that run "
            "to end, or choose another `output_dir`.",
            path=directory,
        ) from None
    except OSError as error:
        warnings.warn(
            f"The file system of `{directory}` has no locks ({error}). Make sure that no other "
            "run writes there.",
            stacklevel=4,
        )


def _sign(descriptor: int, run_id: str) -> None:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "run_id": run_id,
    }
    content = strict_json.dump(owner)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _holder(descriptor: int) -> str:
    try:
        owner: Any = strict_json.parse(os.pread(descriptor, _MOST_BYTES, 0))
        pid, host, since = (str(owner[name])[:64] for name in ("pid", "host", "since"))
        run = str(owner["run_id"])[:64]
        return f"process {pid} on host {host} since {since}" + (f" (run {run})" if run else "")
    except (LookupError, TypeError, ValueError):
        return "another process"  # which has not signed yet


def _let_go_in_child() -> None:
    # A worker that outlives a killed run must not keep its lock.
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork") and sys.platform != "win32":
    os.register_at_fork(after_in_child=_let_go_in_child)
