"""What the launchers of a job tell each other, from their meeting to the exit of the last one.

Each has one connection to that of machine 0, which decides: when an attempt begins, when all is
done, and why the job ends. The kernel closes the connection of a launcher that ends; all say every
few seconds that they live, so that one that is stopped or cut off is missed.
"""

import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.watch.connections import GONE, Address, Links

ASKED, FAILED, LOST = "asked", "failed", "lost"
"""Why a job ends: a signal, a process that failed, a machine that is gone."""

# Less than the watch of the processes takes, so that one launcher says it for all of a machine.
_UNREACHABLE_SECONDS = 35  # and a few more until all have ended are less than a minute
_SILENT = (
    f"unreachable for {_UNREACHABLE_SECONDS} s: machine, network or power, or its launcher is "
    "stopped"
)
_KILLED = "unreachable: its launcher was killed, or the machine went down"
_WORD = "trainkit launch"  # which all know; from the end of their meeting on it is a random one
_MOST_MACHINES, _MOST_NUMBERS = 1 << 20, 1 << 60
_LOOK_SECONDS = 1.0
_LEAVE_SECONDS = 5.0  # in which the others have left, when there is nothing more to say


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Why the job ends before all is done.

    Args:
        kind: `ASKED`, `FAILED` or `LOST`.
        code: What launchers exit with.
        signum: The signal that the processes of all machines get; 0: none.
    """

    kind: str
    machine: int
    cause: str
    code: int = 1
    signum: int = 0


class JobEnded(Exception):
    """The processes of this machine must end, because the job does; its argument is the `End`."""


class Link:
    """The part of this launcher in the talk of all of them.

    A thread hears; the methods are for the main thread.

    Args:
        links: The connections; owned from now on. None where there is no other machine.

    Attributes:
        names: The host name of each machine, as far as it is known.
        present: Those that are connected: machine 0, and on that the others.
        end: Why the job ends.
        cards: What each machine has said of itself, when all have come.
        fault: What keeps them apart, empty where they go on; None as long as that is not known.
        word: What a launcher must say to come in.
        wanted: The attempt that all must come to, from 0.
        begun: The attempt that all have come to.
        port: Of the store of its processes, on machine 0.
        secret: A word for the processes of the job, from machine 0 as soon as an attempt has begun.
        is_over: Whether machine 0 has said that nothing more will come.
    """

    def __init__(self, machine: int, size: int, links: Links | None = None) -> None:
        self.names: dict[int, str] = {}
        self.present: set[int] = set()
        self.end: End | None = None
        self.cards: list[dict[str, Any]] = []
        self.fault: str | None = None
        self.wanted, self.begun, self.port = 0, -1, 0
        self.word = _WORD
        self.secret = secrets.token_hex(16)
        self.is_over = False
        self._machine = machine
        self._machines = set(range(size))
        self._links = links
        self._lost: set[int] = set()
        self._said: dict[str, dict[int, Any]] = {}  # by kind, then by machine
        self._queue: deque[Callable[[Links], object]] = deque()  # for the thread
        self._closing = False
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        if links is not None:
            self._thread.start()

    def name(self, machine: int) -> str:
        """Return what a machine is called in sentences."""
        host = self.names.get(machine)
        return f"machine {machine} ({host})" if host else f"machine {machine}"

    def said(self, kind: str) -> dict[int, Any]:
        """Return what machine 0 has been told, by machine; cards by connection."""
        return self._said.setdefault(kind, {})

    @property
    def left(self) -> set[int]:
        """The processes that have ended with code 0; on machine 0 those of all machines."""
        return {rank for ranks in [*self.said("left").values()] for rank in ranks}

    def tell(self, kind: str, what: Any) -> None:
        """Say something to machine 0."""
        message = {"kind": kind, "to": 0, "what": what}
        if self._machine == 0:
            self._take(0, message)
        else:
            self.do(lambda links: links.send(message))

    def tell_end(self, kind: str, cause: str, code: int, signum: int = 0) -> End:
        """Say that the processes of this machine have failed, or end; return why the job does."""
        end = End(kind=kind, machine=self._machine, cause=cause, code=code, signum=signum)
        self.tell("end", asdict(end))
        self.wait(lambda: self.end, _LEAVE_SECONDS)
        self.end = self.end or end
        return self.end

    def share(self, **what: Any) -> None:
        """Set attributes of the links of all machines; on machine 0 alone."""
        self._set(what)
        self.do(lambda links: links.send({"kind": "share", "what": what}))

    def do(self, act: Callable[[Links], object]) -> None:
        """Let the thread do something with the connections, if there are any."""
        if self._links is not None:
            self._queue.append(act)
            self._links.wake()

    def wait(self, until: Callable[[], object], seconds: float | None = None) -> bool:
        """Wait for something that is heard of; return whether it has come in time."""
        with self._changed:
            return bool(self._changed.wait_for(until, seconds))

    def come_to(self, attempt: int, open_store: Callable[[], int]) -> None:
        """Wait until all machines are ready for an attempt.

        Args:
            open_store: What machine 0 does when the others are ready; returns the port.

        Raises:
            JobEnded: They will not be.
        """
        if self._machine == 0:
            self._wait_or_end(lambda: self._are("ready", attempt, self._machines - {0}))
            self.said("left").clear()
            self.port = open_store()
        self.tell("ready", attempt)
        self._wait_or_end(lambda: self.begun >= attempt)

    def gather(self, story: dict[str, Any], seconds: float) -> Mapping[int, dict[str, Any]] | None:
        """Bring together how the processes of each machine have ended.

        Returns:
            On machine 0 the stories by machine; None on others, when it has shown them; the own one
            alone where it is gone.
        """
        self.tell("story", story)
        if self._machine == 0:
            self.wait(lambda: self.present <= self.said("story").keys(), seconds)
            return dict(self.said("story"))
        # It may be gone, and not be missed yet.
        self.wait(lambda: self.is_over or 0 not in self.present, 2 * seconds)
        return None if self.is_over else {self._machine: story}

    def close(self) -> None:
        """Leave; machine 0 says a last word to all before."""
        if self._closing or self._links is None:
            return
        if self._machine == 0:
            if not self.is_over and self.end is None:
                self.tell_end(FAILED, f"{self.name(0)} has left", 1)
            if not self.is_over:
                self.share(is_over=True)
            self.wait(lambda: not self.present, _LEAVE_SECONDS)  # they have heard it
        self._closing = True
        self._links.wake()
        self._thread.join(_LEAVE_SECONDS)

    def _wait_or_end(self, until: Callable[[], bool]) -> None:
        self.wait(lambda: until() or self.end is not None)
        if self.end is not None:
            raise JobEnded(self.end)

    def _are(self, kind: str, attempt: int, machines: set[int]) -> bool:
        return all(self.said(kind).get(machine, -1) >= attempt for machine in machines)

    def _run(self) -> None:
        assert self._links is not None
        try:
            while not self._closing or self._queue:
                for number, message in self._links.poll(0.0 if self._queue else _LOOK_SECONDS):
                    self._take(number, message)
                while self._queue:
                    self._queue.popleft()(self._links)
                self._look(self._links)
        except Exception as error:  # no job goes on without
            self._lose(self._machine, f"cannot talk to the others: {error!r}")
        finally:
            self._links.close()

    def _look(self, links: Links) -> None:
        """Note who is there, and who has said nothing for too long."""
        lines = {**links.children, **({} if links.parent is None else {0: links.parent})}
        for number, line in lines.items():
            machine = number % _MOST_MACHINES
            if line.silent > _UNREACHABLE_SECONDS and machine not in self._lost:
                self._lose(machine, _SILENT)
        with self._changed:
            self.present = {number % _MOST_MACHINES for number in lines} - self._lost
            self._changed.notify_all()

    def _take(self, number: int, message: dict[str, Any]) -> None:
        """Note what was said over a connection; machine 0 also decides, and tells all."""
        machine = number % _MOST_MACHINES
        kind: str = message["kind"]
        what: Any = message.get("what")
        with self._changed:
            if kind == GONE:
                self._on_gone(machine, is_silent=bool(message.get("unreachable")))
            elif kind == "share" and machine == 0:
                self._set(what)
            elif kind == "end":
                self._on_end(End(**what))
            else:
                self.said(kind)[number if kind == "card" else machine] = what
            if self._machine == 0:
                self._decide()
            self._changed.notify_all()

    def _set(self, what: Mapping[str, Any]) -> None:
        with self._changed:
            for name, value in what.items():
                setattr(self, name, End(**value) if name == "end" else value)
            if "word" in what:
                self.do(lambda links: links.know(what["word"]))
            self._changed.notify_all()

    def _decide(self) -> None:
        """Begin an attempt when all are ready for it, end the job when all are done."""
        wanted = max([self.wanted, *self.said("ready").values()])
        begun = wanted if self._are("ready", wanted, self._machines) else self.begun
        if (wanted, begun) != (self.wanted, self.begun):
            self.share(wanted=wanted, begun=begun, port=self.port, secret=self.secret)
        is_done = self._are("finished", wanted, self._machines)
        if is_done and not self.is_over and self.end is None:
            self.share(is_over=True)

    def _on_gone(self, machine: int, *, is_silent: bool) -> None:
        """Note that a launcher is gone; that of another machine than 0 only machine 0 judges."""
        if self.is_over or machine in self.said("story") or 0 not in (machine, self._machine):
            return
        self._lose(machine, _SILENT if is_silent else _KILLED)

    def _lose(self, machine: int, what: str) -> None:
        with self._changed:
            self._lost.add(machine)
            self._on_end(End(kind=LOST, machine=machine, cause=f"{self.name(machine)} {what}"))
            self._changed.notify_all()

    def _on_end(self, end: End) -> None:
        """Note why the job ends: the first reason counts, but none hides that a machine is gone."""
        # A process may have left because a machine is gone, before its launcher hears of that.
        if self.end is not None and (end.kind != LOST or self.end.kind == LOST):
            return
        if self._machine == 0:
            self.share(end=asdict(end))
        else:
            self.end = end


def open_link(size: int, listening: socket.socket) -> Link:
    """Return the link of machine 0, which the others come to."""
    port = int(listening.getsockname()[1])
    return Link(0, size, Links(0, _MOST_NUMBERS, Address("", port, _WORD), listening))


def reach_link(machine: int, size: int, host: str, port: int) -> Link | None:
    """Return the link of another machine; None where machine 0 does not let it in."""
    # Of machines that are there twice each comes in, to be told so.
    number = machine + _MOST_MACHINES * (1 + secrets.randbelow(1 << 30))
    links = Links(number, _MOST_NUMBERS, Address(host, port, _WORD))
    if links.reach_root():
        return Link(machine, size, links)
    links.close()
    return None
