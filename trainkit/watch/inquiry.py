"""Ask the processes of a job that stands still where they are, and say who holds it up (rule 32).

Process 0 asks. Each process says in a few words where it is; who is shown at length in the report
is asked for its stack too. Whether a process that says nothing is frozen is judged by the one that
it is connected to, which is on its machine and can look closer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trainkit.watch.connections import Links
from trainkit.watch.exit import say
from trainkit.watch.line import UNREACHABLE_SECONDS, Line, Message
from trainkit.watch.member import Member
from trainkit.watch.stalls import Unanswered, Verdict, examples, judge, stands, where

__all__ = ["Inquiry", "is_frozen", "silence"]

_SURE_SECONDS = 1.0  # after which a process that is stopped, or could have answered, is frozen
_SILENT_SECONDS = 10.0  # without any answer, after which one that may run is
_LOST_SECONDS = 20.0  # without any answer, after which it does not matter what is not known
_STACK_SECONDS = 3.0
_SIGN_SECONDS = 3.0  # between the signs of life of process 0
_NO_SIGN_SECONDS = 12.0
_TURN_SECONDS = 5.0


class Inquiry:
    """What is known of a job that stands still; for the thread of the watch.

    Args:
        links: The connections of this process.
        send: Sends a message; returns at once.
        main: The main thread.
        latest: Returns which collective this process has begun last, in words.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Links,
        send: Callable[[Message], None],
        main: int,
        latest: Callable[[], str] = str,
    ) -> None:
        self.states: dict[int, Message] = {}  # of the processes that have answered
        self.verdict: Verdict | None = None
        self._rank = rank
        self._size = size
        self._links = links
        self._send = send
        self._main = main
        self._latest = latest
        self._began: float | None = None
        self._heard = self._signed = 0.0  # when the last answer, the last sign of life came
        self._silent: dict[int, str] = {}
        self._asked: dict[int, Unanswered] = {}  # neighbours that have not said anything
        self._is_led = False  # process 0 has said something
        self._left: Line | None = None  # to who passed on what process 0 says, and is frozen
        self._wanted: list[int] | None = None  # whose stacks were asked for
        self._stacks: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether the job is known to stand still."""
        return self._began is not None

    def begin(self, now: float, place: Mapping[str, Any]) -> None:
        """Say that the job stands still, as this process has found, and that it is at `place`."""
        if self._began is None:
            self._send({"kind": "stalled", "to": 0} if self._rank else {"kind": "state?"})
            self._join(now, place)

    def on_message(self, rank: int, message: Message, now: float, place: Mapping[str, Any]) -> None:
        """Take in what another process says."""
        self._heard = now
        match message["kind"]:
            case "stalled" if self._rank == 0:
                self.begin(now, place)
            case "state":
                self.states[rank] = message
            case "silent":
                self._silent[int(message["rank"])] = str(message["why"])
            case "stack" if rank in self.states:
                self.states[rank]["stack"] = message["stack"]
                self._stacks.add(rank)
            case "state?" | "stacks?" | "sign" | "verdict":
                self._signed, self._is_led = now, True
                self._obey(message, now, place)

    def _obey(self, message: Message, now: float, place: Mapping[str, Any]) -> None:
        """Do what process 0 says."""
        if message["kind"] == "state?" and self._began is None:
            self._join(now, place)
        elif message["kind"] == "stacks?" and self._rank in message["ranks"]:
            self._send({"kind": "stack", "to": 0, "stack": where(self._main)["stack"]})
        elif message["kind"] == "verdict":
            told = message["text"], message["process"], tuple(message["frozen"])
            self.verdict = Verdict(*told)

    def look(self, now: float, ended: Mapping[int, str]) -> None:
        """Come to the verdict, if it is time."""
        if self._began is None or self.verdict is not None:
            return
        self._look_at_children(now, self._began)
        if self._rank:
            self._look_at_parent(now, ended)
            return
        if now - self._signed > _SIGN_SECONDS:
            self._signed = now
            self._send({"kind": "sign"})
        known = self.states.keys() | self._silent.keys() | ended.keys()
        if len(known) < self._size and now - self._heard < _LOST_SECONDS:
            return
        unknown = set(range(self._size)) - known
        silent = dict.fromkeys(unknown, "does not answer") | {
            rank: why for rank, why in self._silent.items() if rank not in self.states
        }
        verdict = judge(self.states, silent)
        if self._wanted is None:
            self._wanted = [verdict.process] if verdict.process in self.states else []
            self._wanted += [rank for rank in examples(self.states) if rank not in self._wanted]
            self._send({"kind": "stacks?", "ranks": self._wanted})
            self._heard = now
        elif self._stacks >= {*self._wanted} - {0} or now - self._heard > _STACK_SECONDS:
            self._decide(verdict)

    def frozen(self) -> list[Member]:
        """Return the neighbours of this process that cannot end by themselves."""
        lines = [*self._links.lines, *([] if self._left is None else [self._left])]
        blamed = () if self.verdict is None else self.verdict.frozen
        members = (line.member for line in lines if line.rank in blamed)
        return [member for member in members if member and member.is_here()]

    def _join(self, now: float, place: Mapping[str, Any]) -> None:
        """Say where this process is; from now on there is a verdict to wait for."""
        self._began = self._heard = self._signed = now
        here = where(self._main)
        if here["inside"] and (latest := self._latest()):
            here["latest"] = latest
        phase, step = place.get("phase", "unknown"), place.get("step", "unknown")
        text = f"phase {phase}, after step {step}, {stands(here)}"
        stack = here.pop("stack")
        state = {**here, "phase": phase, "step": step, "text": text}
        self.states[self._rank] = {**state, "stack": stack}
        self._send({**state, "kind": "state", "to": 0})

    def _look_at_children(self, now: float, began: float) -> None:
        """Find those that are connected to this process and do not answer."""
        for rank, line in self._links.children.items():
            if rank in self.states or rank in self._silent or line.has_ended or not line.member:
                continue
            sure = self._could_answer(line, now)
            since = began if sure else self._heard
            if now - since > (_SURE_SECONDS if sure else _SILENT_SECONDS):
                self._silent[rank] = why = silence(line)
                self._send({"kind": "silent", "to": 0, "rank": rank, "why": why})

    def _look_at_parent(self, now: float, ended: Mapping[int, str]) -> None:
        """Find that who passes on what process 0 says is frozen, or process 0 itself."""
        parent = self._links.parent
        if parent is None or parent.member is None or parent.rank is None:
            return
        sure = self._could_answer(parent, now, only_if_stopped=self._is_led)
        limit = _SURE_SECONDS if sure else _NO_SIGN_SECONDS
        if parent.rank == 0 and self._rank != min(set(range(1, self._size)) - ended.keys()):
            limit += _TURN_SECONDS  # the first one tells the others, by ending it
        if now - self._signed <= limit:
            return
        why = silence(parent)
        if parent.rank == 0 or not self._links.leave_parent():
            self._decide(judge(self.states, {parent.rank: why}))
            return
        self._signed, self._left = now, parent
        self._send({"kind": "stalled", "to": 0})
        self._send({**self.states[self._rank], "kind": "state", "to": 0})
        self._send({"kind": "silent", "to": 0, "rank": parent.rank, "why": why})

    def _could_answer(self, line: Line, now: float, *, only_if_stopped: bool = False) -> bool:
        """Return whether a neighbour is known to be stopped, or asked and not starved."""
        if line.member is None or line.rank is None or not line.member.is_here():
            return False
        if line.member.is_stopped() or only_if_stopped:
            return line.member.is_stopped()
        return self._asked.setdefault(line.rank, Unanswered(line.member, now)).could_answer(now)

    def _decide(self, verdict: Verdict) -> None:
        self.verdict = verdict
        text, process, frozen = verdict.text, verdict.process, verdict.frozen
        self._send({"kind": "verdict", "text": text, "process": process, "frozen": frozen})


_STOPPED_SECONDS = 40.0  # of silence, after which one that the kernel does not run is frozen
_UNKNOWN_SECONDS = 300.0  # after which another one is: it may only hold the interpreter lock
_NOTED_SECONDS = 30.0 + UNREACHABLE_SECONDS  # after which one of another machine is spoken of


def is_frozen(line: Line) -> bool:
    """Return whether the process at the other end is frozen; says once that it is silent.

    One of this machine that uses a processor, or that a debugger holds, is not.
    """
    member = line.member
    here = member is not None and member.is_here() and line.silent > _STOPPED_SECONDS
    if member is None or line.has_ended or not (here or line.silent > _NOTED_SECONDS):
        return False
    if here and member.is_stopped():
        return True
    if not line.is_noted:
        line.is_noted = True
        say(f"trainkit: process {line.rank} {silence(line)}. The job goes on.")
    used, line.used = line.used, member.used() if here else 0.0
    if here and (line.used != used or member.is_stopped("t")):
        line.silent = 0.0
    return line.silent > _UNKNOWN_SECONDS


def silence(line: Line) -> str:
    """Return in words that the process at the other end does not answer, and what it does."""
    member = line.member
    if member is not None and member.is_here():
        return f"({member}) does not answer: {member.doing()}"
    return (
        f"({member}) does not answer since {line.silent:.0f} s: it is frozen, or holds the "
        "interpreter lock, or its machine cannot be reached"
    )
