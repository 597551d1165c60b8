"""Ask the processes of a job that stands still where they are, and say who holds it up (rule 32).

Process 0 asks. Whether a process that says nothing is frozen is judged by the one that it is
connected to, which is on its machine and can look closer.
"""

from trainkit.watch import timing
from trainkit.watch.connections import Line, Message
from trainkit.watch.exit import say
from trainkit.watch.member import Member
from trainkit.watch.this_process import ThisProcess
from trainkit.watch.verdict import Verdict, judge

__all__ = ["Inquiry", "is_frozen", "silence"]


class Inquiry:
    """What is known of a job that stands still; for the thread of the watch."""

    def __init__(self, this: ThisProcess) -> None:
        self.states: dict[int, Message] = {}  # of the processes that have answered
        self.verdict: Verdict | None = None
        self._this = this
        self._began: float | None = None
        self._heard = 0.0  # when anybody last said something
        self._silent: dict[int, str] = {}
        self._left: list[Line] = []  # to who passed on what process 0 says, and is frozen

    @property
    def is_open(self) -> bool:
        """Whether the job is known to stand still."""
        return self._began is not None

    def begin(self, now: float) -> None:
        """Say that the job stands still, as this process has found."""
        if self._began is None:
            self._this.send({"kind": "stalled", "to": 0} if self._this.rank else {"kind": "state?"})
            self._join(now)

    def on_message(self, rank: int, message: Message, now: float) -> None:
        """Take in what another process says."""
        match message["kind"]:
            case "stalled" if self._this.rank == 0:
                self.begin(now)
            case "state?" if self._began is None:
                self._join(now)
                if self._this.links.parent is not None:  # which has just spoken
                    self._this.links.parent.heard_at = now
            case "state":
                self.states[rank] = message
            case "silent":
                self._silent[int(message["rank"])] = str(message["why"])
            case "verdict":
                told = message["text"], message["process"], tuple(message["frozen"])
                self.verdict = Verdict(*told)
            case _:
                return
        self._heard = now

    def look(self, now: float) -> None:
        """Come to the verdict, if it is time."""
        this = self._this
        if self._began is None or self.verdict is not None:
            return
        for rank, line in this.links.children.items():
            known = rank in self.states or rank in self._silent or line.has_ended
            if not known and self._is_frozen(line, now, self._began):
                self._silent[rank] = why = silence(line)
                self._this.send({"kind": "silent", "to": 0, "rank": rank, "why": why})
        parent = this.links.parent
        if parent is not None and self._is_frozen(parent, now, self._began):
            self._do_without(parent, now)
        known_ranks = self.states.keys() | self._silent.keys() | this.ended.keys()
        if this.rank or (len(known_ranks) < this.size and now - self._heard < timing.LOST):
            return
        unknown = set(range(this.size)) - known_ranks
        silent = dict.fromkeys(unknown, "does not answer") | {
            rank: why for rank, why in self._silent.items() if rank not in self.states
        }
        self._decide(judge(self.states, silent))

    def frozen(self) -> list[Member]:
        """Return the neighbours of this process that cannot end by themselves."""
        blamed = () if self.verdict is None else self.verdict.frozen
        lines = [*self._this.links.lines, *self._left]
        members = (line.member for line in lines if line.rank in blamed)
        return [member for member in members if member and member.is_here()]

    def _join(self, now: float) -> None:
        """Say where this process is; from now on there is a verdict to wait for."""
        self._began = self._heard = now
        for line in self._this.links.lines:
            line.used = line.member.used() if line.member and line.member.is_here() else 0.0
        self.states[self._this.rank] = self._this.place()
        self._this.send({**self.states[self._this.rank], "kind": "state", "to": 0})

    def _is_frozen(self, line: Line, now: float, began: float) -> bool:
        """Return whether a neighbour does not answer, and could if it lived.

        One that the kernel has not stopped may only be starved by a busy machine: then it has used
        little of a processor since it was asked, and others are late as well.
        """
        if line.member is not None and line.member.is_here():
            if line.member.is_stopped():
                return min(line.silent, now - began) > timing.SURE
            has_run = line.member.used() - line.used >= timing.OWN
            if has_run and line.heard_at < began and now - began > timing.SURE:
                return True
        return min(line.silent, now - self._heard) > timing.ANSWER

    def _do_without(self, parent: Line, now: float) -> None:
        """Tell process 0 that who passes on what it says is frozen; if that is itself, judge."""
        assert parent.rank is not None
        why, began = silence(parent), self._began or now
        if parent.rank == 0 or not self._this.links.leave_parent():
            # The first of the others tells why and ends it: who found it earlier would leave the
            # others with a process that was killed, for no reason that they know.
            is_late = now - began > timing.TICK + 2 * timing.SURE
            if self._this.is_first_without((parent.rank,)) or is_late:
                self._decide(judge(self.states, {parent.rank: why}))
            return
        self._left.append(parent)
        self._heard = now
        self._this.send({"kind": "stalled", "to": 0})
        self._this.send({**self.states[self._this.rank], "kind": "state", "to": 0})
        self._this.send({"kind": "silent", "to": 0, "rank": parent.rank, "why": why})

    def _decide(self, verdict: Verdict) -> None:
        self.verdict = verdict
        text, process, frozen = verdict.text, verdict.process, verdict.frozen
        self._this.send({"kind": "verdict", "text": text, "process": process, "frozen": frozen})


def is_frozen(line: Line) -> bool:
    """Return whether the process at the other end is frozen; says once that it is silent.

    One of this machine that uses a processor, or that a debugger holds, is not.
    """
    member = line.member
    here = member is not None and member.is_here() and line.silent > timing.STOPPED
    if member is None or line.has_ended or not (here or line.silent > timing.NOTED):
        return False
    if here and member.is_stopped():
        return True
    if not line.is_noted:
        line.is_noted = True
        say(f"trainkit: process {line.rank} {silence(line)}. The job goes on.")
    used, line.used = line.used, member.used() if here else 0.0
    if here and (line.used != used or member.is_stopped("t")):
        line.silent = 0.0
    return line.silent > timing.SILENT


def silence(line: Line) -> str:
    """Return in words that the process at the other end does not answer, and what it does."""
    member = line.member
    if member is not None and member.is_here():
        return f"({member}) does not answer: {member.doing()}"
    return (
        f"({member}) does not answer since {line.silent:.0f} s: it is frozen, or holds the "
        "interpreter lock, or its machine cannot be reached"
    )
