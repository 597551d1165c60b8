"""The processes of a job end when their launcher is killed, which cannot tell them any more."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

_RELEASED = "released\n"
_PAUSE = 0.1  # seconds between looks at processes that are ending


class OrphanKiller:
    """A small process at the other end of a pipe that notices when this one dies.

    It then ends the processes that hold on to it: by SIGTERM, and by SIGKILL when the time is up.
    To be made before there are threads.

    Args:
        seconds: Time that the processes get to save.
    """

    def __init__(self, seconds: float) -> None:
        theirs, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                _watch(theirs, seconds)
            finally:
                os._exit(0)
        os.close(theirs)

    def hold(self, groups: Iterable[int]) -> None:
        """Tie these process groups to the life of this process, instead of earlier ones."""
        self._tell(f"{' '.join(map(str, groups))}\n")

    def release(self) -> None:
        """Let go of all groups; returns when the small process has ended."""
        self._tell(_RELEASED)
        os.close(self._pipe)
        os.waitpid(self._pid, 0)

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # somebody has killed it: the job goes on without
            os.write(self._pipe, line.encode())


def _watch(pipe: int, seconds: float) -> None:
    """Wait for the other end; if it is gone without a release, end the processes."""
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: list[int] = []
    with os.fdopen(pipe, encoding="ascii") as lines:
        for line in lines:
            if line == _RELEASED:
                return
            groups = [int(word) for word in line.split()]
    for signum, given in ((signal.SIGTERM, seconds), (signal.SIGKILL, 0.0)):
        groups = [group for group in groups if _send(group, signum)]
        end = time.monotonic() + given
        while time.monotonic() < end and any(_send(group, 0) for group in groups):
            time.sleep(_PAUSE)


def _send(group: int, signum: int) -> bool:
    """Send a signal to a process group; return whether there is one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)
        return True
    return False
