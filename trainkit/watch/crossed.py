"""Find processes that wait for each other for ever, in different collectives.

Two kinds can only be the fruit of code that not all processes run, and need no limit of time: one
has begun a collective that another has not, while that one has begun one which the first has not;
or both have begun equally many, and the latest are not the same.
"""

from collections.abc import Callable
from typing import NamedTuple

from trainkit.watch.callers import Position, ahead, position_of
from trainkit.watch.line import Message
from trainkit.watch.stalls import where

__all__ = ["TICK_SECONDS", "Crossed"]

TICK_SECONDS = 5.0
"""How often is looked. Whoever has moved says so within it."""

_STILL_SECONDS = 15.0  # in one collective, before anybody is asked


class _Wait(NamedTuple):
    """A collective that a process waits in.

    Args:
        at: How many it has begun in each group.
        latest: Which one of ours it has begun last.
        of_torch: Which one of torch it has called itself, if it waits in that.
    """

    at: Position
    latest: str
    of_torch: str

    def excludes(self, other: "_Wait") -> bool:
        """Return whether two processes that wait so wait for each other."""
        if self.at != other.at:
            return ahead(self.at, other.at) and ahead(other.at, self.at)
        own = self.of_torch and other.of_torch and self.of_torch != other.of_torch
        return self.latest != other.latest or bool(own)


class Crossed:
    """Looks after the collectives that this process waits in; for the thread of the watch.

    Args:
        send: Sends a message; returns at once.
        position: Returns where this process is.
        latest: Returns which collective it has begun last, in words.
        main: The thread that waits.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Message], None],
        position: Callable[[], Position],
        latest: Callable[[], str],
        main: int,
    ) -> None:
        self._rank = rank
        self._send = send
        self._position = position
        self._latest = latest
        self._main = main
        self._at: Position = None
        self._since = 0.0
        self._looked_at = 0.0
        self._told = False  # process 0 knows that this one waits
        self._waiting: dict[int, _Wait] = {}  # what process 0 knows
        self._crossed_since: float | None = None

    def on_message(self, rank: int, message: Message) -> None:
        """Take in where another process waits, or that it does no longer."""
        if message["kind"] == "waits":
            at = position_of(message["at"])
            self._waiting[rank] = _Wait(at, str(message["latest"]), str(message["of_torch"]))
        elif message["kind"] == "moves":
            self._waiting.pop(rank, None)

    def look(self, now: float) -> bool:
        """Return, on process 0, whether it and another one wait for each other."""
        if now - self._looked_at < TICK_SECONDS / 2:  # it was woken by something else
            return False
        self._looked_at = now
        at = self._position()
        if at != self._at:
            self._at, self._since = at, now
        here = where(self._main) if now - self._since >= _STILL_SECONDS else {"inside": ""}
        waits = bool(here["inside"])
        mine = _Wait(at, self._latest(), here["of_torch"]) if waits else None
        if self._rank != 0:
            if waits != self._told:
                kind = {"kind": "moves"} if mine is None else {"kind": "waits", **mine._asdict()}
                self._send({**kind, "to": 0})
                self._told = waits
            return False
        if mine is None or not any(map(mine.excludes, self._waiting.values())):
            self._crossed_since = None
            return False
        if self._crossed_since is None:
            self._crossed_since = now
        return now - self._crossed_since > 2 * TICK_SECONDS
