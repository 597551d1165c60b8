"""The watch of a process over the others, and over its own progress (rule 32)."""

import faulthandler
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from trainkit.distributed.watch import Progress
from trainkit.errors import text_of
from trainkit.hints import hint_for, tells_of_lost_peer
from trainkit.host import process_memory
from trainkit.signals import is_failing
from trainkit.watch import exit, report as reports, stalls
from trainkit.watch.callers import Position
from trainkit.watch.connections import Links
from trainkit.watch.monitor import WatchThread
from trainkit.watch.report import Report

__all__ = ["JobWatch"]

# A lost connection is heard of by the monitor at about the time when a collective raises for it.
_EXPLAIN_SECONDS = 1.5


class JobWatch:
    """Ends this process when another one of the job fails, and tells the others when it fails.

    A thread of its own does so, also while the main thread sits in a collective; see `WatchThread`.
    The methods are for the main thread. In a fork they do nothing.

    Args:
        links: The connections to them; owned from now on.
        position: Returns how many collectives this process has begun.
        latest: Returns which one it has begun last, in words.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Links,
        position: Callable[[], Position],
        latest: Callable[[], str] = str,
    ) -> None:
        self._monitor = WatchThread(rank, size, links, position, latest)
        self.callers = self._monitor.callers
        self._pid = os.getpid()
        self._rank = rank
        self._fits = 0  # how many were begun
        self._followed: list[Progress] = []  # each inside the one before
        self._reported: BaseException | None = None
        self._closed = False

    def begin(self) -> None:
        """Start to watch."""
        with suppress(Exception):  # there may be no real stderr
            if not faulthandler.is_enabled():
                faulthandler.enable()
        self._hook_before = sys.excepthook
        sys.excepthook = self._hook
        # Children of `multiprocessing` run no `atexit`.
        self._finalizer = multiprocessing.util.Finalize(None, self._finish, exitpriority=100)
        self._monitor.start()

    def follow(self, watched: Progress) -> None:
        """Watch the progress of a run too, until `unfollow`."""
        self._fits += 1
        self._followed.append(watched)
        self._monitor.follow(watched)
        folder, place = self._monitor.folder, watched.output_dir
        if place is not None and folder is not None and "TRAINKIT_ADDRESS" in os.environ:
            with suppress(OSError):  # for the launcher, which leaves the report of the job there
                (folder / "output_dir").write_text(str(place))

    def unfollow(self) -> None:
        """Watch the run before it again, if any; whoever called it may go on after its failure."""
        self._followed.pop()
        self._monitor.follow(self._followed[-1] if self._followed else None)
        self._monitor.failing_since = None

    def fail(self, error: BaseException, report: Report, folder: Path | None) -> None:
        """Report that this process failed, and tell the others; waits until they are told.

        An error that comes from the end of another process waits for the monitor to hear of that.
        Then this process leaves, and the call does not return.

        Args:
            report: What to write.
            folder: Where to; None: only on stderr.
        """
        if not self._is_at_work():
            return
        monitor = self._monitor
        if tells_of_lost_peer(error):
            is_first = self._rank == monitor.first_without()
            if monitor.hears():
                monitor.leaves_at_once = True
                monitor.tell({"kind": "broken", "to": 0})  # who waits for no lost one to come again
                # Not every process has a connection that breaks: the first that has one speaks. Who
                # is told anything meanwhile leaves; what process 0 hears it may pass on late.
                time.sleep(_EXPLAIN_SECONDS * (1 if is_first else 2 if monitor.ended else 4))
                monitor.leaves_at_once = False
                is_first = True  # if another had spoken, this one would have left
            report = self._left_behind(report, error, secondary=not is_first)
            error.add_note(f"trainkit: {report.cause}. {report.hint}")
        self._reported = error
        monitor.failed_fits.add(self._fits)
        monitor.failing_since = time.monotonic()
        monitor.tell({"kind": "failed", "fit": self._fits, "text": report.cause})
        exit.publish(report, folder)

    def close(self, how: str = "left the job by `close`") -> None:
        """Tell the others that this process ends in order, and `how`; stop to watch."""
        if self._pid != os.getpid() or self._closed:
            return
        self._closed = True
        self._monitor.close(how)
        self._finalizer.cancel()
        if sys.excepthook == self._hook:
            sys.excepthook = self._hook_before

    def _left_behind(self, report: Report, error: BaseException, *, secondary: bool) -> Report:
        """Return a report that says who has ended in order, if that is why a collective broke."""
        ended = self._monitor.ended
        if not ended:
            return report
        who, how = next(iter(ended.items()))
        return replace(
            report,
            cause=f"process {who} {how} while the others wait in {stalls.call_of(error)}",
            hint="Every process must make the same calls, as often as the others: look for one "
            "behind `if rank == 0`, and for loops of different lengths.",
            process=who,
            secondary=secondary,
        )

    def _is_at_work(self) -> bool:
        return self._pid == os.getpid() and not self._closed

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Be `sys.excepthook`: what nobody caught ends the process, and so the job."""
        ends = getattr(sys, "last_value", None) is error and self._is_at_work()
        try:
            if ends:  # else somebody only wants it to be printed
                self.fail_for_good(error)
        finally:
            self._hook_before(kind, error, trace)
        if ends and not (hasattr(sys, "ps1") or sys.flags.interactive):
            exit.end_after(error)

    def fail_for_good(self, error: BaseException) -> None:
        """Report an error that nobody will catch."""
        if not self._is_at_work():
            return
        monitor, cause = self._monitor, exit.sentence(error)
        if error is not self._reported:
            report = replace(
                monitor.report("error", cause, process=self._rank),
                error=reports.error_parts(error),
                hint=hint_for(type(error).__name__, text_of(error)),
                memory=process_memory(),
                secondary=exit.is_secondary(error),
            )
            self.fail(error, report, monitor.folder)
        monitor.failing_since = time.monotonic()
        monitor.tell({"kind": "failed", "fit": 0, "text": cause})

    def _finish(self) -> None:
        """End where Python runs the finalizers of `multiprocessing`: in order, or failing."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = (error.__context__ or error) if error.code else None
        if error is not None:
            self.fail_for_good(error)
        elif not is_failing():
            self.close("ended with code 0")
