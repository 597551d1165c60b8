"""What the launchers of a job tell each other, from their meeting to the exit of the last one.

Each has one connection to that of machine 0, which decides: when an attempt begins, when all is
done, and why the job ends. The kernel closes the connection of a launcher that ends; all say every
few seconds that they live, so that one that is stopped or cut off is missed.
"""

import fcntl
import secrets
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainkit.watch.connections import GONE, Links

__all__ = ["ASKED", "FAILED", "LOST", "End", "JobEnded", "Link"]

ASKED, FAILED, LOST = "asked", "failed", "lost"
"""Why a job ends: a signal, a process that failed, a machine that is gone."""

_LOOK_SECONDS = 1.0
UNREACHABLE_SECONDS = 35  # and a few more until all have ended are less than a minute


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Why the job ends before all is done.

    Args:
        kind: `ASKED`, `FAILED` or `LOST`.
        machine: Where.
        cause: In one sentence.
        code: What launchers exit with.
        at: When it was heard of, on the clock of time.monotonic.
    """

    kind: str
    machine: int
    cause: str
    code: int = 1
    at: float = field(default_factory=time.monotonic)


class JobEnded(Exception):
    """The processes of this machine must end, because the job does.

    Args:
        end: Why.
    """

    def __init__(self, end: End) -> None:
        super().__init__(end.cause)
        self.end = end


class Link:
    """The part of this launcher in the talk of all of them.

    A thread hears; the methods are for the main thread.

    Args:
        size: Machines in all.
        links: The connections; owned from now on. None where there is no other machine.

    Attributes:
        names: The host name of each machine, as far as it is known.
        end: Why the job ends.
        wanted: The attempt that all must come to, from 0.
        begun: The attempt that all have come to.
        secret: A word for the processes of the job, from machine 0 as soon as an attempt has begun.
        is_over: Whether machine 0 has said that nothing more will come.
        verdict: What it said with it.
        present: Those that are connected: machine 0, and on that the others.
        awaited: Those, and those whose connection broke, as long as they may connect again.
        cut_off: Those whose machine, or the network to it, is gone without a word.
    """

    def __init__(self, machine: int, size: int, links: Links | None) -> None:
        self.names: dict[int, str] = {}
        self.end: End | None = None
        self.wanted, self.begun = 0, -1
        self.secret = secrets.token_hex(16)
        self.is_over, self.verdict = False, ""
        self.present = set() if links is None or links.parent is None else {0}
        self.awaited = self.present
        self.cut_off: set[int] = set()
        self._missed: set[int] = set()  # those, and those whose launcher is stopped
        self._machine = machine
        self._machines = set(range(size))
        self._links = links
        self._said: dict[str, dict[int, Any]] = {}  # by kind, then by machine
        self._queue: deque[dict[str, Any]] = deque()
        self._closing = False
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        if links is not None:
            self._thread.start()

    def name(self, machine: int) -> str:
        """Return what a machine is called in sentences."""
        host = self.names.get(machine)
        return f"machine {machine} ({host})" if host else f"machine {machine}"

    @property
    def left(self) -> set[int]:
        """The processes that have ended with code 0; on machine 0 those of all machines."""
        return {rank for ranks in [*self._of("left").values()] for rank in ranks}

    def tell(self, kind: str, what: Any) -> None:
        """Say something to machine 0."""
        message = {"kind": kind, "to": 0, "what": what}
        if self._links is None:
            self._take(0, message)
        else:
            self._queue.append(message)
            self._links.wake()

    def tell_end(self, kind: str, cause: str, code: int) -> None:
        """Say that the processes of this machine have failed, or were asked to end."""
        self.tell("end", asdict(End(kind=kind, machine=self._machine, cause=cause, code=code)))

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for something that is heard of; return whether it has come in time."""
        with self._changed:
            return self._changed.wait_for(until, seconds)

    def come_to(self, attempt: int, first: Callable[[], None]) -> None:
        """Wait until all machines are ready for an attempt.

        Args:
            attempt: Its number, from 0.
            first: What machine 0 does when the others are ready.

        Raises:
            JobEnded: They will not be.
        """
        if self._machine == 0:
            self._wait_or_end(lambda: self._are("ready", attempt, self._machines - {0}))
            self._of("left").clear()
            first()
        self.tell("ready", attempt)
        self._wait_or_end(lambda: self.begun >= attempt)

    def gather(self, story: dict[str, Any], seconds: float) -> Mapping[int, dict[str, Any]] | None:
        """Bring together how the processes of each machine have ended.

        Args:
            story: That of this machine.
            seconds: How long the others may take.

        Returns:
            On machine 0 the stories by machine; None on others that it answers, by `verdict`; the
            own one alone where it does not.
        """
        self.tell("story", story)
        if self._machine == 0:
            self.wait(lambda: {0} | self.awaited <= self._of("story").keys(), seconds)
            return dict(self._of("story"))
        self.wait(lambda: self.is_over or 0 not in self.present, 2 * seconds)
        return None if self.is_over else {self._machine: story}

    def close(self, verdict: str = "") -> None:
        """Leave; machine 0 says a last word to all before."""
        if self._machine == 0 and not self.is_over:
            if self.end is None:
                self.tell_end(FAILED, f"{self.name(0)} has left", 1)
            self.tell("over", verdict)
        self._closing = True
        if self._links is not None:
            self._links.wake()
            self._thread.join(5.0)

    def _wait_or_end(self, until: Callable[[], bool]) -> None:
        self.wait(lambda: until() or self.end is not None)
        if self.end is not None:
            raise JobEnded(self.end)

    def _of(self, kind: str) -> dict[int, Any]:
        return self._said.setdefault(kind, {})

    def _are(self, kind: str, attempt: int, machines: set[int]) -> bool:
        return all(self._of(kind).get(machine, -1) >= attempt for machine in machines)

    # From here on: the thread.

    def _run(self) -> None:
        assert self._links is not None
        try:
            while not self._closing or self._queue:
                self._talk(self._links)
        except Exception as error:  # no job goes on without
            self._lose(self._machine, f"cannot talk to the others: {error!r}")
        finally:
            self._links.close()

    def _talk(self, links: Links) -> None:
        for machine, message in links.poll(0.0 if self._queue else _LOOK_SECONDS):
            self._take(machine, message)
        while self._queue:
            message = self._queue.popleft()
            if self._machine == 0:
                self._take(0, message)
            else:
                links.send(message)
        lines = {**links.children, **({} if links.parent is None else {0: links.parent})}
        for machine, line in lines.items():
            if line.silent > UNREACHABLE_SECONDS and machine not in self._missed:
                self._miss(machine, _unsent(line.connection.fileno()))
        with self._changed:
            self.present = lines.keys() - self._missed
            self.awaited = self.present | links.away.keys() - self._missed
            self._changed.notify_all()

    def _take(self, machine: int, message: dict[str, Any]) -> None:
        """Note what was said; machine 0 also decides, and tells all."""
        with self._changed:
            kind: str = message["kind"]
            what: Any = message.get("what")
            if kind == GONE:
                self._on_gone(machine, is_cut_off=bool(message.get("unreachable")))
            elif kind == "end":
                self._on_end(End(**{k: v for k, v in what.items() if k != "at"}))
            elif kind == "attempt":
                self.wanted, self.begun, self.secret = what
            elif kind == "over":
                self.is_over, self.verdict = True, what
                self._broadcast("over", what)
            else:
                self._of(kind)[machine] = what
            if self._machine == 0:
                self._decide()
            self._changed.notify_all()

    def _decide(self) -> None:
        """Begin an attempt when all are ready for it, end the job when all are done."""
        wanted = max([self.wanted, *self._of("ready").values()])
        begun = wanted if self._are("ready", wanted, self._machines) else self.begun
        if (wanted, begun) != (self.wanted, self.begun):
            self.wanted, self.begun = wanted, begun
            self._broadcast("attempt", (wanted, begun, self.secret))
        is_done = self._are("finished", wanted, self._machines)
        if is_done and not self.is_over and self.end is None:
            self.is_over = True
            self._broadcast("over", "")

    def _on_gone(self, machine: int, *, is_cut_off: bool) -> None:
        """Note that a launcher is gone; that of another machine than 0 only machine 0 judges."""
        if self.is_over or machine in self._of("story") or 0 not in (machine, self._machine):
            return
        if is_cut_off:
            self._miss(machine, unsent=True)
        else:
            self._lose(machine, "unreachable: its launcher was killed, or the machine went down")

    def _miss(self, machine: int, unsent: bool) -> None:
        """Note that nothing comes from a launcher any more."""
        self._missed.add(machine)
        if unsent:
            self.cut_off.add(machine)
            what = f"unreachable for {UNREACHABLE_SECONDS} s: machine, network or power"
            self._lose(machine, what)
        else:
            self._lose(machine, f"silent for {UNREACHABLE_SECONDS} s: its launcher is stopped")

    def _lose(self, machine: int, what: str) -> None:
        with self._changed:
            self._on_end(End(kind=LOST, machine=machine, cause=f"{self.name(machine)} {what}"))
            self._changed.notify_all()

    def _on_end(self, end: End) -> None:
        """Note why the job ends: the first reason counts, but none hides that a machine is gone."""
        asked = self._of("asked")  # which machine got the signal
        if end.kind == ASKED and asked:
            machine, cause = next(iter(asked.items()))
            end = replace(end, machine=machine, cause=cause)
        # A process may have left because a machine is gone, before its launcher hears of that.
        was = self.end
        is_certain = was is not None and (was.kind == LOST or (was.kind == ASKED and asked))
        if was is None or (end.kind == LOST and not is_certain):
            self.end = end
            self._broadcast("end", asdict(end))

    def _broadcast(self, kind: str, what: Any) -> None:
        if self._machine == 0 and self._links is not None:
            self._links.send({"kind": kind, "what": what})


def _unsent(descriptor: int) -> bool:
    """Return whether the other machine has not acknowledged all that was sent to it."""
    with suppress(OSError):
        return bool(struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))[0])
    return True
