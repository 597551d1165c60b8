"""The thread that hears of the end of other processes, and ends this one (rule 32).

It needs no collective, and works while the main thread sits in one.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit.basics.host import kernel_kills, process_memory
from trainkit.distributed.watch import EXIT_OTHER_FAILED, Progress
from trainkit.watch import exit, report as reports, timing
from trainkit.watch.callers import Callers
from trainkit.watch.connections import GONE, Message
from trainkit.watch.exit import EXIT_FAILED, EXIT_STALLED
from trainkit.watch.member import Member
from trainkit.watch.report import Report
from trainkit.watch.stall import Crossed, Inquiry, Verdict, examples, is_frozen
from trainkit.watch.where import ThisProcess


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why this process must end: another one that failed, or was lost.

    Args:
        rank: The other process.
        kind: "failed", "lost", or "unreachable".
        text: What happened: to it, where it failed, else a whole sentence.
        fit: The number of the fit that it failed in; 0 where nobody will catch its error.
        since: When it was heard of.
        cpu: The seconds of the processor that this process had used then.
    """

    rank: int
    kind: str
    text: str
    fit: int = 0
    since: float = field(default_factory=time.monotonic)
    cpu: float = field(default_factory=time.process_time)

    def has_passed(self, now: float) -> bool:
        """Return whether this process had time to end by itself."""
        is_starved = time.process_time() - self.cpu < timing.GRACE_OF_CPU
        return now - self.since > (timing.LONGEST_GRACE if is_starved else timing.GRACE)


class WatchThread:
    """Listens to the other processes of a job, and looks after the progress of this one.

    Attributes:
        callers: The calls that not all processes may make.
        failing_since: When this process itself failed; it then ends by itself, or is ended.
        failed_fits: The fits that raised here; who raised too is no reason to end.
        leaves_at_once: The main thread waits for the cause of its error to be heard of.
    """

    def __init__(self, this: ThisProcess) -> None:
        self.callers = Callers(this)
        self.failing_since: float | None = None
        self.failed_fits: set[int] = set()
        self.leaves_at_once = self._closing = False
        self._this = this
        self._inquiry = Inquiry(this)
        self._crossed = Crossed(this)
        self._sent = threading.Event()
        self._marks: tuple[object, ...] = ()
        self._moved_at = 0.0
        self._failed: set[int] = set()
        self._cause: _Cause | None = None
        self._kills = kernel_kills()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path | None:
        """Where reports go."""
        run = self._this.run
        return reports.folder_for(None if run is None else run.output_dir)

    def follow(self, run: Progress | None) -> None:
        """Look after the progress of a run; of none with None."""
        self._marks, self._moved_at = (), time.monotonic()
        self._this.run = run
        self._this.links.wake()

    def hears(self) -> bool:
        """Return whether others can be heard; not where process 0, which passes on, has ended."""
        return self._thread.is_alive()

    def tell(self, message: Message) -> None:
        """Send a message to the others, and wait until it is on its way."""
        if self.hears():
            self._sent.clear()
            self._this.send(message)
            self._sent.wait(1.0)

    def close(self, outcome: str) -> None:
        """Tell the others that this process ends in order, and end the thread."""
        self._say_done(f"({Member.this()}) {outcome}")
        self._thread.join(2.0)

    # From here on: the thread.

    def _run(self) -> None:
        links, unsent = self._this.links, self._this.unsent
        try:
            while not self._closing or unsent:
                for rank, message in links.poll(self._pause()):
                    self._hear(rank, message)
                while unsent:
                    links.send(unsent.popleft())
                self._sent.set()
                self.callers.on_look()
                if not self._closing:
                    self._look(time.monotonic())
        except Exception as error:  # a job must not end for want of a watch
            exit.say(f"trainkit: the watch of process {self._this.rank} has ended: {error!r}")
        finally:
            self._sent.set()
            links.close()

    def _pause(self) -> float:
        if self._this.unsent or self._closing:
            return 0.0
        alert = self._cause or self._inquiry.is_open or self.failing_since or self.leaves_at_once
        if alert or self.callers.somebody_waits:
            return timing.ALERT
        return timing.TICK if self._this.run is None else timing.PAUSE

    def _hear(self, rank: int, message: Message) -> None:
        this, kind = self._this, message["kind"]
        if kind == "done":
            if this.rank == 0 and not this.ended:  # one of them is enough for the others
                this.send({"kind": "ended", "who": rank, "how": message["how"]})
            this.ended[rank] = str(message["how"])
        elif kind == "ended":
            this.ended[int(message["who"])] = str(message["how"])
        elif kind == "failed":
            self._failed.add(rank)
            self._blame(_Cause(rank, kind, str(message["text"]), int(message["fit"])))
        elif kind == GONE:
            if rank not in this.ended and rank not in self._failed:
                self._blame(_lost(rank, message))
            if this.rank and this.links.parent is None and self._cause is None:
                self._say_done("ended with process 0")  # which passes nothing on any more
        elif kind == "where?" and this.rank in message.get("ranks", [this.rank]):
            shown = {} if message.get("all") else {"stack": ""}
            this.send({**this.place(), **shown, "kind": "place", "to": 0})
        if message.get("to", this.rank) == this.rank:  # else it only goes on from here
            self._inquiry.on_message(rank, message, time.monotonic())
            self.callers.on_message(rank, message)
            self._crossed.on_message(rank, message)

    def _say_done(self, outcome: str) -> None:
        """Tell process 0 that this one ends in order; all, if it is that; then end the thread."""
        self._this.send({"kind": "done", "how": outcome, **({"to": 0} if self._this.rank else {})})
        self._closing = True
        self._this.links.wake()  # the thread may have sent that already, and wait for more

    def _blame(self, cause: _Cause) -> None:
        """Note why this process must end; what nobody will catch counts more than the rest."""
        if self._cause is None:
            self._cause = cause
        elif self._cause.fit and not cause.fit:
            self._cause = replace(cause, since=self._cause.since)

    def _look(self, now: float) -> None:
        """Decide whether this process must end."""
        inquiry, run = self._inquiry, self._this.run
        if self.failing_since is not None:
            if now - self.failing_since > timing.CLEAN_UP:
                text = f"did not end in {timing.CLEAN_UP:g} s after its own error"
                self._leave(EXIT_FAILED, "left", text, None, secondary=True)
        elif inquiry.verdict is not None:
            if not self._this.unsent:
                self._end_stall(inquiry.verdict)
        elif inquiry.is_open and self._cause is None:
            inquiry.look(now)
        elif self._cause is not None:
            self._obey(self._cause, now)
        elif (
            (self._this.rank == 0 and self._crossed.look(now))
            or any(map(is_frozen, self._this.links.lines))
            or (run is not None and self._stands_still(run, now))
        ):
            inquiry.begin(now)

    def _obey(self, cause: _Cause, now: float) -> None:
        """End this process because of another one, unless it fails by itself in time."""
        if cause.fit in self.failed_fits:
            self._cause = None
            return
        is_sure = cause.kind != "failed" or self.leaves_at_once
        if not (is_sure or cause.has_passed(now)):
            return
        if cause.kind == "failed":
            text = f"leaves because process {cause.rank} failed: {cause.text}"
            self._leave(EXIT_OTHER_FAILED, "left", text, cause.rank, secondary=True)
        hint = "Its own output, and the kernel's log, may say more."
        kills = kernel_kills()
        if cause.kind == "unreachable":
            hint = "Look at that machine, and at the network between it and this one."
        elif kills and self._kills is not None and kills > self._kills:
            hint = "The kernel killed a process of this container for want of memory meanwhile."
        self._leave(
            EXIT_OTHER_FAILED,
            "lost",
            cause.text,
            cause.rank,
            secondary=not self._this.is_first_without((cause.rank,)),
            hint=hint,
            memory=process_memory(),
        )

    def _stands_still(self, run: Progress, now: float) -> bool:
        """Return whether there was no progress for longer than the phase allows."""
        phase, first, marks = run.progress()
        same = len(marks) == len(self._marks) and all(
            mark is before or (isinstance(mark, int | str) and mark == before)
            for mark, before in zip(marks, self._marks, strict=True)
        )
        if not same:
            self._marks, self._moved_at = marks, now
        return now - self._moved_at > run.watchdog.limit(phase, first=first)

    def _end_stall(self, verdict: Verdict) -> None:
        """End this process of a job that stands still, and what is frozen beside it."""
        limit, run, states = "", self._this.run, self._inquiry.states
        if run is not None:
            phase, first, _ = run.progress()
            seconds = run.watchdog.limit(phase, first=first)
            limit = f" for {min(seconds, round(time.monotonic() - self._moved_at)):g} s"
        shown = {rank for rank in (verdict.process, *examples(states)) if rank in states}
        frozen = self._inquiry.frozen()
        self._leave(
            EXIT_STALLED,
            "stalled",
            f"no progress{limit}: {verdict.text}",
            verdict.process,
            last=lambda: exit.kill(frozen),
            secondary=not self._this.is_first_without(verdict.frozen),
            states={str(rank): states[rank] for rank in sorted(shown)},
        )

    def _leave(
        self,
        code: int,
        kind: str,
        cause: str,
        process: int | None,
        last: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> None:
        """End this process with a report on where it is; does not return."""
        this = self._this
        report = Report(
            kind=kind,
            cause=cause,
            process=process,
            processes=this.size,
            reporter=this.rank,
            place=this.run_place(),
            **more,
        )
        exit.leave(code, report, self.folder, last)


def _lost(rank: int, gone: Message) -> _Cause:
    """Return what the end of a connection means."""
    place, seconds, who = gone["place"], gone["unreachable"], gone["who"]
    if seconds:
        text = f"{place} unreachable for {seconds} s: machine, network or power"
        return _Cause(rank, "unreachable", f"{text} (process {rank}, {who})")
    text = "ended without a word: killed by a signal, crashed, left by `os._exit`, or cut off"
    return _Cause(rank, "lost", f"process {rank} ({who}) {text}")
