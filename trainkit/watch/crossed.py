"""Find processes that wait for each other for ever, in different collectives.

Two kinds can only be the fruit of code that not all processes run, and need no limit of time: one
has begun a collective that another has not, while that one has begun one which the first has not;
or both have begun equally many, and the latest are not the same.
"""

from trainkit.watch import timing
from trainkit.watch.callers import Position, ahead, position_of
from trainkit.watch.connections import Message
from trainkit.watch.this_process import ThisProcess

__all__ = ["Crossed"]


class Crossed:
    """Looks, on process 0, for a process that it waits for, and that waits for it."""

    def __init__(self, this: ThisProcess) -> None:
        self._this = this
        self._at: Position = None
        self._since = 0.0
        self._looked_at = 0.0
        self._answers: dict[int, Message] = {}  # to the latest question
        self._crossed: dict[tuple[int, Position], float] = {}  # since when who is so, and where

    def on_message(self, rank: int, message: Message) -> None:
        """Take in where another process is."""
        if message["kind"] == "place":
            self._answers[rank] = message

    def look(self, now: float) -> bool:
        """Return whether another process stays where this one and it wait for each other."""
        if now - self._looked_at < timing.TICK / 2:  # it was woken by something else
            return False
        self._looked_at = now
        at = self._this.position()
        if at != self._at:
            self._at, self._since = at, now
        if now - self._since < timing.WAITS:
            return False
        mine = self._this.place()
        found = [
            (rank, position_of(answer["at"]))
            for rank, answer in self._answers.items()
            if mine["inside"] and answer["inside"] and _exclude(mine, answer)
        ]
        self._crossed = {each: self._crossed.get(each, now) for each in found}
        self._answers = {}
        if mine["inside"]:
            self._this.send({"kind": "where?"})
        return any(now - since > 2 * timing.TICK for since in self._crossed.values())


def _exclude(one: Message, other: Message) -> bool:
    """Return whether two processes that wait so wait for each other."""
    here, there = position_of(one["at"]), position_of(other["at"])
    if here != there:
        return ahead(here, there) and ahead(there, here)
    of_torch = one["of_torch"], other["of_torch"]
    return one["latest"] != other["latest"] or (all(of_torch) and of_torch[0] != of_torch[1])
