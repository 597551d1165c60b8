"""A job that stands still: how it is found, where its processes are, who holds it up (rule 32).

Process 0 asks all where they are, and judges; where it says nothing itself, the next one does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkit.errors import MOST_NAMED
from trainkit.watch import timing
from trainkit.watch.callers import Position, ahead, position_of
from trainkit.watch.connections import Line, Message
from trainkit.watch.member import Member
from trainkit.watch.where import ThisProcess

_UNUSED = (
    ". Perhaps parameters are frozen on some processes only, or a step uses other parameters on "
    "some processes than on others: then pass `strategy=DDP(find_unused_parameters=True)`"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a job stands still.

    Args:
        process: The first one that the others wait for; None where they wait for each other.
        frozen: The processes that do not answer.
    """

    text: str
    process: int | None = None
    frozen: tuple[int, ...] = ()


class Inquiry:
    """What is known of a job that stands still; for the thread of the watch."""

    def __init__(self, this: ThisProcess) -> None:
        self.states: dict[int, Message] = {}  # of the processes that have answered
        self.verdict: Verdict | None = None
        self._this = this
        self._began: float | None = None
        self._heard = 0.0  # when anybody last said something

    @property
    def is_open(self) -> bool:
        """Whether the job is known to stand still."""
        return self._began is not None

    def begin(self, now: float) -> None:
        """Say that the job stands still, as this process has found; process 0 asks who is where."""
        if self._began is None:
            this, self._began, self._heard = self._this, now, now
            self.states[this.rank] = this.place()
            for line in this.links.lines:
                line.used = line.member.used() if line.member and line.member.is_here() else 0.0
            asked = {"kind": "stalled", "to": 0} if this.rank else {"kind": "where?", "all": True}
            this.send(asked)

    def on_message(self, rank: int, message: Message, now: float) -> None:
        """Take in what another process says."""
        match message["kind"]:
            case "stalled" if self._this.rank == 0:
                self.begin(now)
            case "place" if self.is_open and message["stack"]:  # else it was asked before
                self.states[rank] = message
            case "verdict":
                told = message["text"], message["process"], tuple(message["frozen"])
                self.verdict = Verdict(*told)
            case _:
                return
        self._heard = now

    def look(self, now: float) -> None:
        """Come to the verdict, if it is time."""
        this, links, quiet = self._this, self._this.links, now - self._heard
        if self._began is None or self.verdict is not None:
            return
        asked = now - self._began
        if links.parent is not None:
            # The first of the others tells why and ends it: who found it earlier would leave the
            # others with a process that was killed, for no reason that they know.
            is_mine = this.is_first_without((0,)) or asked > timing.LOST
            if is_mine and _is_silent(links.parent, asked, quiet):
                self._decide(judge(self.states, {0: _silence(links.parent)}))
        elif this.rank == 0:
            unknown = {*range(this.size)} - self.states.keys() - this.ended.keys()
            known = {rank: links.children[rank] for rank in unknown & links.children.keys()}
            silent = {rank: _silence(e) for rank, e in known.items() if _is_silent(e, asked, quiet)}
            if silent.keys() == unknown or quiet > timing.LOST:
                self._decide(judge(self.states, dict.fromkeys(unknown, "does not answer") | silent))

    def frozen(self) -> list[Member]:
        """Return the neighbours of this process that cannot end by themselves."""
        blamed = () if self.verdict is None else self.verdict.frozen
        members = (line.member for line in self._this.links.lines if line.rank in blamed)
        return [member for member in members if member and member.is_here()]

    def _decide(self, verdict: Verdict) -> None:
        self.verdict = verdict
        text, process, frozen = verdict.text, verdict.process, verdict.frozen
        self._this.send({"kind": "verdict", "text": text, "process": process, "frozen": frozen})


class Crossed:
    """Looks, on process 0, for a process that it waits for, and that waits for it.

    Two kinds can only be the fruit of code that not all processes run, and need no limit of time:
    one has begun a collective that another has not, while that one has begun one which the first
    has not; or both have begun equally many, and the latest are not the same.
    """

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
        waiting = [
            (rank, position_of(answer["at"]))
            for rank, answer in self._answers.items()
            if mine["inside"] and answer["inside"] and _exclude(mine, answer)
        ]
        self._crossed = {each: self._crossed.get(each, now) for each in waiting}
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


def judge(states: Mapping[int, Mapping[str, Any]], silent: Mapping[int, str]) -> Verdict:
    """Return why a job stands still.

    Args:
        states: Where processes are, as `whereabouts` says it, of those that answered.
        silent: Of those that did not, who they are and why not.
    """
    if silent:
        reasons = [f"process {rank} {why}" for rank, why in sorted(silent.items())]
        return Verdict(_listed(reasons), min(silent), tuple(sorted(silent)))
    free = [rank for rank, state in sorted(states.items()) if not state["inside"]]
    if free and len(free) < len(states):
        reasons = [f"process {rank} is at {states[rank]['line']}" for rank in free]
        return Verdict(f"{_listed(reasons)}, and the others wait for it", free[0])
    if free:
        text = "no process is in a collective"
    elif len({(state["inside"], state["step"]) for state in states.values()}) > 1:
        text = "the processes wait in different places"
    else:
        text = "all processes wait in the same place"
    shown = [f"process {rank} {states[rank]['text']}" for rank in examples(states)]
    more = f"; and {len(states) - len(shown)} more" if len(states) > len(shown) else ""
    # In a backward of the same step and line of the user's code, which others have left.
    if len({(state["line"], state["step"]) for state in states.values()}) == 1:
        more += _UNUSED if "backward" in {state["inside"] for state in states.values()} else ""
    return Verdict(f"{text}: {'; '.join(shown)}{more}")


def examples(states: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the processes to be shown: all if they are few, else the first in each place."""
    if len(states) <= MOST_NAMED:
        return sorted(states)
    first: dict[str, int] = {}
    for rank, state in sorted(states.items()):
        first.setdefault(state["text"], rank)
    return list(first.values())[:MOST_NAMED]


def _listed(reasons: list[str]) -> str:
    more = f"; and {len(reasons) - MOST_NAMED} more" if len(reasons) > MOST_NAMED else ""
    return "; ".join(reasons[:MOST_NAMED]) + more


def is_frozen(line: Line) -> bool:
    """Return whether the process at the other end is frozen, in a job that nobody has asked.

    One of this machine that uses a processor, or that a debugger holds, is not.
    """
    member = line.member
    if member is None or line.has_ended or line.silent < timing.STOPPED:
        return False
    if member.is_here():
        if member.is_stopped():
            return True
        used, line.used = line.used, member.used()
        if line.used != used or member.is_stopped("t"):
            line.silent = 0.0
    return line.silent > timing.SILENT


def _is_silent(line: Line, asked: float, quiet: float) -> bool:
    """Return whether a neighbour does not answer, and could if it lived.

    One that the kernel has not stopped may only be starved by a busy machine: then it has used
    little of a processor since it was asked, and others are late as well.

    Args:
        asked: For how long the job is known to stand still.
        quiet: For how long nobody has answered.
    """
    if line.member is not None and line.member.is_here():
        if line.member.is_stopped():
            return line.silent > timing.SURE
        if line.silent > asked > timing.SURE and line.member.used() - line.used >= timing.OWN:
            return True  # it holds the interpreter lock
    return min(line.silent, quiet) > timing.ANSWER


def _silence(line: Line) -> str:
    """Return in words that the process at the other end does not answer, and what it does."""
    member = line.member
    if member is not None and member.is_here():
        return f"({member}) does not answer: {member.doing()}"
    return (
        f"({member}) does not answer since {line.silent:.0f} s: it is frozen, or holds the "
        "interpreter lock, or its machine cannot be reached"
    )
