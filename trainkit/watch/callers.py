"""Find out which processes make a call, before any of them waits in a collective for the others.

All processes begin their collectives in the same order. So one that has begun a collective which
process 0 has not begun is past the call that process 0 is in, and will not make it. The threads of
the watch ask and answer; they read counters that torch keeps, so nothing is counted in a step.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

from trainkit.distributed.watch import Answer
from trainkit.errors import DistributedError
from trainkit.watch.connections import GONE, Message
from trainkit.watch.where import ThisProcess

Position = tuple[int, ...] | None
"""How many collectives a process has begun in each group; None: it has left the groups."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # between two questions
_ALL = "Every process must call it: take it out of `if accelerator.is_main_process:` and the like."


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that a process is in.

    Args:
        name: What was called.
        key: Tells calls from each other that follow each other without a collective.
        at: Where the process was.
    """

    name: str
    key: str
    at: Position


class Callers:
    """The calls that the processes of a job are in, as far as this one knows.

    Methods that begin with `on_` are for the thread of the watch, the others for the main thread.
    """

    def __init__(self, this: ThisProcess) -> None:
        self._this = this
        self._changed = threading.Condition()
        self._mine: _Call | None = None  # what this process is in
        self._ended: set[int] = set()
        self._waiting: dict[int, _Call] = {}  # on process 0, for an answer
        self._places: dict[int, Message] = {}  # where others are that process 0 has asked
        self._answer: Answer | None = None

    @property
    def somebody_waits(self) -> bool:
        """Whether others wait for process 0 to come to a call, or past it."""
        return bool(self._waiting)

    def missing(self, name: str, key: str, seconds: float) -> tuple[int, ...]:
        """Return, on process 0, who does not make the call it is in; waits until that is known.

        Raises:
            DistributedError: It is not known in time; raised by all that make the call.
        """
        end, pause = time.monotonic() + seconds, _FIRST_PAUSE
        with self._changed:
            self._places.clear()
            self._mine = mine = _Call(name, key, self._this.position())
            try:
                while unknown := self._unknown(mine):
                    left = end - time.monotonic()
                    if left <= 0:
                        self._give_up(mine, seconds, unknown)
                    self._this.send({"kind": "where?", "ranks": unknown})
                    self._changed.wait_for(lambda: not self._unknown(mine), min(left, pause))
                    pause = min(2 * pause, _LONGEST_PAUSE)
            except BaseException:  # also Ctrl-C
                self._mine = None
                raise
            return tuple(r for r in range(1, self._this.size) if self._waiting.get(r) != mine)

    def answer(self, answer: Answer) -> None:
        """Tell, on process 0, all that make the call it is in what comes of it."""
        with self._changed:
            waiting = set(self._waiting) - set(answer.missing)
            self._mine = None
            for rank in waiting:
                del self._waiting[rank]
        if waiting:
            self._tell(answer)

    def ask(self, name: str, key: str, seconds: float) -> Answer:
        """Say, on another process, that it makes a call; return what comes of it."""
        with self._changed:
            self._answer = None
            self._mine = _Call(name, key, self._this.position())
            self._this.send(
                {"kind": "calls", "to": 0, "name": name, "key": key, "at": self._mine.at}
            )
            try:
                self._changed.wait_for(lambda: self._answer or 0 in self._ended, seconds)
            finally:
                self._mine = None
            if self._answer is not None:
                return self._answer
        state = "has ended" if 0 in self._ended else f"has not come to it in {seconds:g} s"
        raise DistributedError(
            f"Process {self._this.rank} called `{name}`, but process 0 {state}. {_ALL}"
        )

    def on_message(self, rank: int, message: Message) -> None:
        """Take in what another process says."""
        with self._changed:
            match message["kind"]:
                case "calls":
                    at = position_of(message["at"])
                    self._waiting[rank] = _Call(message["name"], message["key"], at)
                case "place":
                    self._places[rank] = message
                case "answer" if (
                    self._mine is not None and self._this.rank not in message["missing"]
                ):
                    failure = message["failure"] and tuple(message["failure"])
                    self._answer = Answer(tuple(message["missing"]), message["result"], failure)
                case "done" | "ended":
                    self._ended.add(message.get("who", rank))
                case kind if kind == GONE:
                    self._ended.add(rank)
            self._changed.notify_all()

    def on_look(self) -> None:
        """Tell who waits for process 0 that it is past the call, if it is."""
        with self._changed:
            for rank, call in [*self._waiting.items()]:
                if self._mine is None and ahead(self._this.position(), call.at):
                    del self._waiting[rank]
                    others = tuple(other for other in range(1, self._this.size) if other != rank)
                    text = f"Process {rank} called `{call.name}`, but process 0 has gone on without"
                    failure = "DistributedError", f"{text} it. {_ALL}"
                    self._tell(Answer(others, failure=failure))

    def _tell(self, answer: Answer) -> None:
        told = {"result": answer.result, "failure": answer.failure}
        self._this.send({"kind": "answer", "missing": answer.missing, **told})

    def _unknown(self, mine: _Call) -> list[int]:
        """Return the processes of which it is not known whether they make the call."""
        known = self._ended | self._waiting.keys()
        known |= {r for r, p in self._places.items() if ahead(position_of(p["at"]), mine.at)}
        return [rank for rank in range(1, self._this.size) if rank not in known]

    def _give_up(self, mine: _Call, seconds: float, unknown: list[int]) -> None:
        places = "; ".join(
            f"process {r} is at {self._places[r]['line']}"
            if r in self._places
            else f"process {r} does not answer"
            for r in unknown
        )
        error = DistributedError(
            f"Process 0 called `{mine.name}`, and for {seconds:g} s it could not be told whether "
            f"all others will: {places}. Either they are slow, and the time-out of the process "
            "group must be longer; or they go another way, where every process must make the "
            "same calls."
        )
        self.answer(Answer(tuple(unknown), failure=(type(error).__name__, str(error))))
        raise error


def ahead(now: Position, at: Position) -> bool:
    """Return whether a process has begun a collective after it, or another one, was at `at`."""
    if now is None or at is None:
        return now is None
    return any(begun > before for begun, before in zip(now, at, strict=False))


def position_of(value: Any) -> Position:
    """Return a position that has travelled as JSON."""
    return None if value is None else tuple(value)
