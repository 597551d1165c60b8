"""The thread that hears of the end of other processes, and ends this one (rule 32).

It needs no collective, and works while the main thread sits in one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit.distributed.watch import Progress
from trainkit.host import kernel_kills, process_memory
from trainkit.watch import crossed, exit, report as reports, stalls
from trainkit.watch.callers import Callers, Position
from trainkit.watch.connections import GONE, Links
from trainkit.watch.exit import EXIT_FAILED, EXIT_OTHER_FAILED, EXIT_STALLED
from trainkit.watch.inquiry import Inquiry, is_frozen
from trainkit.watch.line import Message
from trainkit.watch.member import Member
from trainkit.watch.report import Report
from trainkit.watch.stalls import Verdict

__all__ = ["WatchThread"]

# A process that hears of a failure may be about to raise the same error, agreed by all; then it
# leaves by itself. It gets this long, more where the machine is too busy to run it, or until its
# main thread has not moved for a while.
_GRACE_SECONDS = 2.0
_GRACE_OF_CPU, _LONGEST_GRACE = 0.3, 20.0
_STILL_SECONDS = 0.6
_CLEAN_UP_SECONDS = 30.0  # for a process that has failed itself
_ALERT_PAUSE, _PAUSE = 0.1, 0.5


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
    fit: int
    since: float
    cpu: float = field(default_factory=time.process_time)

    def has_passed(self, now: float) -> bool:
        """Return whether this process had time to end by itself."""
        seconds, used = now - self.since, time.process_time() - self.cpu
        return seconds > (_GRACE_SECONDS if used > _GRACE_OF_CPU else _LONGEST_GRACE)


class WatchThread:
    """Listens to the other processes of a job, and looks after the progress of this one.

    Args:
        links: The connections to them; owned from now on.
        position: Returns how many collectives this process has begun.
        latest: Returns which one it has begun last, in words.

    Attributes:
        callers: The calls that not all processes may make.
        failing_since: When this process itself failed; it then ends by itself, or is ended.
        failed_fits: The fits that raised here; who raised too is no reason to end.
        leaves_at_once: The main thread waits for the cause of its error to be heard of.
        closing: Whether this process ends in order.
        ended: The processes that said that they end in order, and how: on process 0 all.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Links,
        position: Callable[[], Position],
        latest: Callable[[], str] = str,
    ) -> None:
        self.callers = Callers(rank, size, self._post, position)
        self.failing_since: float | None = None
        self.failed_fits: set[int] = set()
        self.leaves_at_once = self.closing = self._is_broken = False
        self._rank = rank
        self._size = size
        self._links = links
        self._main = threading.main_thread().ident or 0
        self._queue: deque[Message] = deque()
        self._sent = threading.Event()
        self._watched: Progress | None = None
        self.ended: dict[int, str] = {}
        self._failed: set[int] = set()
        self._cause: _Cause | None = None
        self._inquiry = Inquiry(rank, size, links, self._post, self._main, latest)
        self._marks: tuple[object, ...] = ()
        self._moved_at = 0.0
        self._stillness = stalls.Stillness(self._main)
        self._kills = kernel_kills()
        self._crossed = crossed.Crossed(rank, self._post, position, latest, self._main)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @property
    def folder(self) -> Path | None:
        """Where reports go."""
        return reports.folder_for(None if self._watched is None else self._watched.output_dir)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def follow(self, watched: Progress | None) -> None:
        """Look after the progress of a run; of none with None."""
        self._marks, self._moved_at = (), time.monotonic()
        self._watched = watched
        self.wake()

    def hears(self) -> bool:
        """Return whether others can be heard; not where process 0, which passes on, has ended."""
        return self._thread.is_alive()

    def tell(self, message: Message) -> None:
        """Send a message to the others, and wait until it is on its way."""
        if not self.hears():
            return
        self._sent.clear()
        self._queue.append(message)
        self.wake()
        self._sent.wait(1.0)

    def wake(self) -> None:
        """Make the thread look at once."""
        self._links.wake()

    def close(self, how: str) -> None:
        """Tell the others that this process ends in order, and end the thread."""
        self._queue.append({"kind": "done", "how": f"({Member.this()}) {how}"})
        self.closing = True
        self.wake()
        self._thread.join(2.0)

    def report(self, kind: str, cause: str, **more: Any) -> Report:
        """Return a report of this process on where it is."""
        more.setdefault("process", None)
        place, processes = self._run_place(), self._size
        return Report(
            kind=kind, cause=cause, processes=processes, reporter=self._rank, place=place, **more
        )

    def first_without(self, others: Iterable[int] = ()) -> int:
        """Return the first process that has not ended, as far as is known, and is none of some."""
        return min(set(range(self._size)) - self.ended.keys() - set(others))

    # From here on: the thread.

    def _run(self) -> None:
        try:
            while not self.closing or self._queue:
                self._links.is_patient = not (self.leaves_at_once or self._is_broken)
                for rank, message in self._links.poll(self._pause()):
                    self._hear(rank, message)
                while self._queue:
                    self._links.send(self._queue.popleft())
                self._sent.set()
                self.callers.on_look()
                self._look(time.monotonic())
        except Exception as error:  # a job must not end for want of a watch
            exit.say(f"trainkit: the watch of process {self._rank} has ended: {error!r}")
        finally:
            self._sent.set()
            self._links.close()

    def _pause(self) -> float | None:
        if self._queue or self.closing:
            return 0.0
        alert = self._cause or self._inquiry.is_open or self.failing_since or self.leaves_at_once
        if alert or self.callers.somebody_waits:
            return _ALERT_PAUSE
        return crossed.TICK_SECONDS if self._watched is None else _PAUSE

    def _post(self, message: Message) -> None:
        self._queue.append(message)
        self.wake()

    def _hear(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "done":
            self.ended[rank] = str(message.get("how"))
        elif kind == "failed":
            self._failed.add(rank)
            self._blame(rank, kind, str(message.get("text")), int(message.get("fit", 0)))
        elif kind == GONE:
            if rank not in self.ended and rank not in self._failed:
                self._blame(rank, *_lost(rank, message), 0)
            if self._rank and self._links.parent is None and self._cause is None:
                self.closing = True  # it ended in order, and passes nothing on any more
                self._queue.append({"kind": "done", "how": "ended with process 0"})
        elif kind == "broken":
            self._is_broken = True
        else:
            self._inquiry.on_message(rank, message, time.monotonic(), self._run_place())
        if message.get("to", self._rank) == self._rank:  # else it only goes on from here
            self.callers.on_message(rank, message)
            self._crossed.on_message(rank, message)

    def _blame(self, rank: int, kind: str, text: str, fit: int) -> None:
        """Note why this process must end; what nobody will catch counts more than the rest."""
        known = self._cause
        if known is None or (known.fit and not fit):
            since = time.monotonic() if known is None else known.since
            self._cause = _Cause(rank, kind, text, fit, since)

    def _look(self, now: float) -> None:
        """Decide whether this process must end."""
        if self.closing:
            return
        if self.failing_since is not None:
            if now - self.failing_since > _CLEAN_UP_SECONDS:
                text = f"did not end in {_CLEAN_UP_SECONDS:g} s after its own error"
                self._leave(EXIT_FAILED, self.report("left", text, secondary=True))
        elif self._inquiry.is_open and (self._inquiry.verdict or self._cause is None):
            self._inquiry.look(now, self.ended)
            if self._inquiry.verdict is not None and not self._queue:
                self._end_stall(self._inquiry.verdict)
        elif self._cause is not None:
            self._obey(self._cause, now)
        elif (
            self._crossed.look(now)
            or any(map(is_frozen, self._links.lines))
            or (self._watched is not None and self._stands_still(self._watched, now))
        ):
            self._inquiry.begin(now, self._run_place())

    def _obey(self, cause: _Cause, now: float) -> None:
        """End this process because of another one, unless it fails by itself in time."""
        if cause.fit in self.failed_fits:
            self._cause = None
            return
        sure = cause.kind != "failed" or self.leaves_at_once
        is_still = self._stillness.seconds(now) > _STILL_SECONDS
        if not (sure or is_still or cause.has_passed(now)):
            return
        if cause.kind == "failed":
            text = f"leaves because process {cause.rank} failed: {cause.text}"
            report = self.report("left", text, process=cause.rank, secondary=True)
        else:
            report = self._loss(cause)
        self._leave(EXIT_OTHER_FAILED, report)

    def _loss(self, cause: _Cause) -> Report:
        """Return the report on a process that ended without a word, or cannot be reached."""
        hint = "Its own output, and the kernel's log, may say more."
        kills = kernel_kills()
        if cause.kind == "unreachable":
            hint = "Look at that machine, and at the network between it and this one."
        elif kills and self._kills is not None and kills > self._kills:
            hint = "The kernel killed a process of this container for want of memory meanwhile."
        secondary = self._rank != self.first_without({cause.rank})
        report = self.report("lost", cause.text, process=cause.rank, secondary=secondary)
        return replace(report, hint=hint, memory=process_memory())

    def _stands_still(self, watched: Progress, now: float) -> bool:
        """Return whether there was no progress for longer than the phase allows."""
        phase, first, marks = watched.progress()
        same = len(marks) == len(self._marks) and all(map(_same, marks, self._marks))
        if not same:
            self._marks, self._moved_at = marks, now
        return now - self._moved_at > watched.watchdog.limit(phase, first=first)

    def _end_stall(self, verdict: Verdict) -> None:
        """End this process of a job that stands still, and what is frozen beside it."""
        limit = ""
        if self._watched is not None:
            phase, first, _ = self._watched.progress()
            seconds = self._watched.watchdog.limit(phase, first=first)
            limit = f" for {min(seconds, round(time.monotonic() - self._moved_at)):g} s"
        states = self._inquiry.states
        report = self.report(
            "stalled",
            f"no progress{limit}: {verdict.text}",
            process=verdict.process,
            secondary=self._rank != self.first_without(verdict.frozen),
            states={str(rank): states[rank] for rank in stalls.examples(states)},
        )
        frozen = self._inquiry.frozen()
        self._leave(EXIT_STALLED, report, lambda: exit.kill(frozen))

    def _leave(self, code: int, report: Report, last: Callable[[], None] = lambda: None) -> None:
        exit.leave(code, report, self.folder, last)

    def _run_place(self) -> dict[str, Any]:
        with suppress(Exception):  # the main thread may be changing what is read
            return {} if self._watched is None else self._watched.place()
        return {}


def _lost(rank: int, gone: Message) -> tuple[str, str]:
    """Return what the end of a connection means: the kind of the cause, and a sentence."""
    if gone.get("unreachable"):
        return "unreachable", (
            f"{gone.get('place')} unreachable for {gone['unreachable']} s: machine, network or "
            f"power (process {rank}, {gone.get('who')})"
        )
    return "lost", (
        f"process {rank} ({gone.get('who')}) ended without a word: killed by a signal, crashed, or "
        "left by `os._exit`"
    )


def _same(mark: object, before: object) -> bool:
    return mark is before or (isinstance(mark, int | str) and mark == before)
