"""Find processes that wait for each other for ever, in collectives of different groups.

One that has begun a collective which another has not, while that one has begun one which the
first has not, can only be the fruit of code that not all processes run. It needs no limit of time.
"""

from collections.abc import Callable

from trainkit.watchdog.callers import Position, ahead, position_of
from trainkit.watchdog.line import Message
from trainkit.watchdog.stalls import where

__all__ = ["TICK_SECONDS", "Crossed"]

TICK_SECONDS = 5.0
"""How often is looked. Whoever has moved says so within it."""

_STILL_SECONDS = 15.0  # in one collective, before anybody is asked


class Crossed:
    """Looks after the collectives that this process waits in; for the thread of the watch.

    Args:
        send: Sends a message; returns at once.
        position: Returns where this process is.
        main: The thread that waits.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Message], None],
        position: Callable[[], Position],
        main: int,
    ) -> None:
        self._rank = rank
        self._send = send
        self._position = position
        self._main = main
        self._at: Position = None
        self._since = 0.0
        self._looked_at = 0.0
        self._told = False  # process 0 knows that this one waits
        self._waiting: dict[int, Position] = {}  # what process 0 knows
        self._crossed_since: float | None = None

    def on_message(self, rank: int, message: Message) -> None:
        """Take in where another process waits, or that it does no longer."""
        if message["kind"] == "waits":
            self._waiting[rank] = position_of(message["at"])
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
        waits = now - self._since >= _STILL_SECONDS and bool(where(self._main)["inside"])
        if self._rank != 0:
            if waits != self._told:
                self._send({"kind": "waits" if waits else "moves", "to": 0, "at": at})
                self._told = waits
            return False
        others = self._waiting.values()
        if not waits or not any(ahead(at, other) and ahead(other, at) for other in others):
            self._crossed_since = None
            return False
        if self._crossed_since is None:
            self._crossed_since = now
        return now - self._crossed_since > 2 * TICK_SECONDS
