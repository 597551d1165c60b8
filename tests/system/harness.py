"""A fork server for runs that are killed: starts them in a second, and knows what they promised."""

import faulthandler
import os
import select
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from tests.system.toys import BEGUN, PLACES, messages

TIME_LIMIT = 300.0  # seconds in which a run must end; much, for a busy machine


class Job:
    """The processes of a run under way, in a process group of their own.

    Args:
        size: Number of processes.
        folder: Where they write; their output goes to `log-<rank>` in it.
        body: Called with the rank and a pipe for announcements; returns the exit code.
    """

    def __init__(self, size: int, folder: Path, body: Callable[[int, int], int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self.folder = folder
        self.codes: dict[int, int] = {}  # by rank; negative: the signal
        self.pids: list[int] = []
        self._rendezvous = folder / f"rendezvous-{uuid.uuid4().hex[:8]}"
        self._pipe, pipe = os.pipe()
        self._heard = b""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # idle threads of the parent
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    self._be(rank, size, pipe, body)
                self.pids.append(pid)
                with suppress(OSError):
                    os.setpgid(pid, self.group)  # the child does so too; whoever comes first
        os.close(pipe)
        self._ends = {rank: os.pidfd_open(pid) for rank, pid in enumerate(self.pids)}

    @property
    def group(self) -> int:
        """The process group of all ranks and of whatever they start."""
        return self.pids[0]

    def _be(self, rank: int, size: int, pipe: int, body: Callable[[int, int], int]) -> None:
        """Be one rank; never returns."""
        code = 99
        try:
            os.setpgid(0, self.pids[0] if self.pids else 0)
            log = os.open(self.folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
            faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True)
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_WORLD_SIZE=str(size),
                TRAINKIT_INIT_METHOD=f"file://{self._rendezvous}",
            )
            torch.set_num_threads(1)
            code = body(rank, pipe)
        except BaseException:
            with suppress(BaseException):
                traceback.print_exc()
        finally:
            # No clean-up of inherited state: it belongs to the parent.
            os._exit(code)

    def wait(self, seconds: float = TIME_LIMIT) -> bool:
        """Wait until all have ended, at most `seconds`; return whether they have."""
        deadline = time.monotonic() + seconds
        while self._ends:
            poll = select.poll()
            for descriptor in (*self._ends.values(), self._pipe):
                poll.register(descriptor, select.POLLIN)
            ready = dict(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
            if self._pipe in ready:
                self._hear()
            for rank, descriptor in [*self._ends.items()]:
                if descriptor in ready:
                    self._reap(rank)
            if not ready and time.monotonic() >= deadline:
                return False
        return True

    def wait_for_begin(self, seconds: float = TIME_LIMIT) -> bool:
        """Wait until every rank catches signals; return whether that came about."""
        deadline = time.monotonic() + seconds
        while sum(number == BEGUN for _, number in messages(self._heard)) < len(self.pids):
            readable, _, _ = select.select([self._pipe], [], [], deadline - time.monotonic())
            if not readable or not self._hear():
                return False
        return True

    def wait_for(self, place: str, seconds: float) -> bool:
        """Wait until a rank comes to a place next, at most `seconds`; return whether all ended."""
        deadline, heard = time.monotonic() + seconds, len(self._heard)
        while (left := deadline - time.monotonic()) > 0:
            if self.wait(min(left, 1e-3)):
                return True
            if place in (PLACES.get(number) for _, number in messages(self._heard[heard:])):
                return False
        return False

    @property
    def place(self) -> str:
        """Where the ranks were when one of them was last heard of."""
        numbers = [number for _, number in messages(self._heard)]
        return PLACES.get(numbers[-1], "between") if numbers else "start"

    def send(self, signum: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to all processes of the run with their workers."""
        with suppress(ProcessLookupError):
            if rank is None:
                os.killpg(self.group, signum)
            elif rank not in self.codes:
                os.kill(self.pids[rank], signum)

    def end(self) -> None:
        """Kill what is left, with everything that it started."""
        self.send(signal.SIGKILL)
        self.wait()
        self._hear()
        os.close(self._pipe)
        with suppress(FileNotFoundError):
            self._rendezvous.unlink()

    @property
    def acked(self) -> list[int]:
        """The steps that processes were told to be committed."""
        return [number for _, number in messages(self._heard) if number >= 0]

    def left_behind(self, seconds: float = 30.0) -> bool:
        """Return whether anything that the ranks started outlives them by `seconds`."""
        deadline = time.monotonic() + seconds
        while _lives(self.group):
            if time.monotonic() > deadline:
                return True
            time.sleep(0.02)
        return False

    def log(self) -> str:
        """Return what the ranks printed."""
        paths = sorted(self.folder.glob("log-*"))
        return "\n".join(f"---- {path.name}:\n{path.read_text()}" for path in paths)

    def _reap(self, rank: int) -> None:
        _, status = os.waitpid(self.pids[rank], 0)
        self.codes[rank] = os.waitstatus_to_exitcode(status)
        os.close(self._ends.pop(rank))

    def _hear(self) -> bool:
        """Take in what was announced; return False where nobody can announce any more."""
        os.set_blocking(self._pipe, False)
        try:
            while data := os.read(self._pipe, 1 << 16):
                self._heard += data
        except BlockingIOError:
            return True
        return False


def _lives(group: int) -> bool:
    """Return whether a process of a group runs; one that waits to be reaped does not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


@contextmanager
def running(size: int, folder: Path, body: Callable[[int, int], int]) -> Iterator[Job]:
    """Start a run, and leave nothing of it at the end."""
    job = Job(size, folder, body)
    try:
        yield job
    finally:
        job.end()
