"""Find out which processes make a call, before any of them waits in a collective for the others.

All processes begin their collectives in the same order. So one that has begun a collective which
process 0 has not begun is past the call that process 0 is in, and will not make it. The threads of
the watch ask and answer; they read counters that torch keeps, so nothing is counted in a step.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.distributed.watch import Answer
from trainkit.errors import DistributedError
from trainkit.watch.connections import GONE
from trainkit.watch.line import Message
from trainkit.watch.stalls import where

__all__ = ["Callers", "Position", "ahead", "position_of"]

Position = tuple[int, ...] | None
"""How many collectives a process has begun in each group; None: it has left the groups."""

_REPLY_SECONDS = 1.0  # in which a process that is not frozen says where it is


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

    Args:
        send: Sends a message; returns at once.
        position: Returns where this process is.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[Message], None],
        position: Callable[[], Position],
    ) -> None:
        self.somebody_waits = False
        """Whether others wait for this process to come to a call, or past it."""
        self._rank = rank
        self._size = size
        self._send = send
        self._position = position
        self._changed = threading.Condition()
        self._main = threading.main_thread().ident or 0
        self._mine: _Call | None = None  # what this process is in
        self._ended: set[int] = set()
        # On process 0:
        self._number = 0  # of the question
        self._here: dict[int, _Call] = {}  # processes that wait for an answer
        self._passed: set[int] = set()
        self._places: dict[int, str] = {}
        # On the others:
        self._asked: tuple[int, Position] | None = None
        self._answer: Answer | None = None

    def missing(self, name: str, key: str, seconds: float) -> tuple[int, ...]:
        """Return, on process 0, who does not make the call it is in; waits until that is known.

        Raises:
            DistributedError: It is not known in time; raised by all that make the call.
        """
        with self._changed:
            self._number += 1
            self._passed.clear()
            self._places.clear()
            self._mine = mine = _Call(name, key, self._position())
            try:
                if self._unknown():
                    self._send({"kind": "asked", "number": self._number, "at": mine.at})
                if not self._wait(lambda: not self._unknown(), seconds):
                    self._give_up(mine, seconds)
            except BaseException:  # also Ctrl-C
                self._mine = None
                raise
            return tuple(r for r in range(1, self._size) if self._here.get(r) != mine)

    def answer(self, answer: Answer) -> None:
        """Tell, on process 0, all that make the call it is in what comes of it."""
        with self._changed:
            waiting = set(self._here) - set(answer.missing)
            self._mine = None
            for rank in waiting:
                del self._here[rank]
        if waiting:
            self._send(
                {
                    "kind": "answer",
                    "missing": answer.missing,
                    "result": answer.result,
                    "failure": answer.failure,
                }
            )

    def ask(self, name: str, key: str, seconds: float) -> Answer:
        """Say, on another process, that it makes a call; return what comes of it.

        Raises:
            DistributedError: Process 0 does not make it, or does not come in time.
        """
        with self._changed:
            self._answer = self._asked = None
            self._mine = _Call(name, key, self._position())
            self._send({"kind": "here", "to": 0, "name": name, "key": key, "at": self._mine.at})
            try:
                self._wait(lambda: self._answer is not None or 0 in self._ended, seconds)
            finally:
                self._mine = None
            if self._answer is not None:
                return self._answer
        state = "has ended" if 0 in self._ended else f"has not come to it in {seconds:g} s"
        raise DistributedError(
            f"Process {self._rank} called `{name}`, but process 0 {state}. {_ALL}"
        )

    def on_message(self, rank: int, message: Message) -> None:
        """Take in what another process says."""
        with self._changed:
            match message["kind"]:
                case "here":
                    at = position_of(message["at"])
                    self._here[rank] = _Call(message["name"], message["key"], at)
                case "asked":
                    self._asked = message["number"], position_of(message["at"])
                case "passed" if message["number"] == self._number:
                    self._passed.add(rank)
                case "place":
                    self._places[rank] = message["line"]
                case "answer" if self._mine is not None and self._rank not in message["missing"]:
                    self._answer = _answer_of(message)
                case "where?" if self._mine is None:
                    self._send({"kind": "place", "to": 0, "line": where(self._main)["line"]})
                case kind if kind in ("done", GONE):
                    self._ended.add(rank)
            self._changed.notify_all()

    def on_look(self) -> None:
        """Tell who waits for this process that it is past the call, if it is."""
        with self._changed:
            self.somebody_waits = False
            if self._mine is not None:
                return
            now = self._position() if self._asked is not None or self._here else ()
            if self._asked is not None and ahead(now, self._asked[1]):
                self._send({"kind": "passed", "to": 0, "number": self._asked[0]})
                self._asked = None
            for rank, call in list(self._here.items()):
                if ahead(now, call.at):
                    self._refuse(rank, call)
            self.somebody_waits = self._asked is not None or bool(self._here)

    def _refuse(self, rank: int, call: _Call) -> None:
        """Tell a process that process 0 is past its call."""
        del self._here[rank]
        others = [other for other in range(1, self._size) if other != rank]
        text = f"Process {rank} called `{call.name}`, but process 0 has gone on without it. {_ALL}"
        self._send(
            {
                "kind": "answer",
                "missing": others,
                "result": None,
                "failure": ("DistributedError", text),
            }
        )

    def _unknown(self) -> list[int]:
        """Return the processes of which it is not known whether they make the call."""
        known = self._ended | self._passed | self._here.keys()
        return [rank for rank in range(1, self._size) if rank not in known]

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not done():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, 1.0))
        return True

    def _give_up(self, mine: _Call, seconds: float) -> None:
        unknown = self._unknown()
        self._send({"kind": "where?"})
        self._wait(lambda: self._places.keys() >= set(unknown), _REPLY_SECONDS)
        places = "; ".join(
            f"process {r} is at {self._places[r]}"
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
        text = type(error).__name__, str(error)
        self.answer(Answer(missing=tuple(unknown), failure=text))
        raise error


_ALL = "Every process must call it: take it out of `if accelerator.is_main_process:` and the like."


def ahead(now: Position, at: Position) -> bool:
    """Return whether a process has begun a collective after it, or another one, was at `at`."""
    if now is None or at is None:
        return now is None
    return any(begun > before for begun, before in zip(now, at, strict=False))


def position_of(value: Any) -> Position:
    """Return a position that has travelled as JSON."""
    return None if value is None else tuple(value)


def _answer_of(message: Mapping[str, Any]) -> Answer:
    failure = message["failure"]
    told = None if failure is None else (str(failure[0]), str(failure[1]))
    return Answer(tuple(message["missing"]), message["result"], told)
