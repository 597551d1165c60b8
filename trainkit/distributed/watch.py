"""The watch of a process over the others, and over its own progress (DESIGN 2.32)."""

import faulthandler
import multiprocessing.util
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from trainkit import reports
from trainkit.distributed import leaving
from trainkit.distributed.group import failed
from trainkit.distributed.links import Links
from trainkit.distributed.lookout import Lookout, Watched
from trainkit.distributed.stalls import Member
from trainkit.reports import Report

__all__ = ["Watch", "Watched"]

# A lost connection is heard of by the lookout at about the time when a collective raises for it.
_EXPLAIN_SECONDS = 1.5


class Watch:
    """Ends this process when another one of the job fails, and tells the others when it fails.

    A thread of its own does so, also while the main thread sits in a collective; see `Lookout`.
    The methods are for the main thread. In a fork they do nothing.

    Args:
        rank: Of this process.
        members: All processes of the job.
        links: The connections to them; owned from now on.
    """

    def __init__(self, rank: int, members: Mapping[int, Member], links: Links) -> None:
        self._lookout = Lookout(rank, members, links)
        self._pid = os.getpid()
        self._rank = rank
        self._fits = 0  # how many were begun
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
        self._lookout.start()

    def follow(self, watched: Watched) -> None:
        """Watch the progress of a run too, until `unfollow`."""
        self._fits += 1
        self._lookout.follow(watched)

    def unfollow(self) -> None:
        """No longer watch the run; whoever called it may go on after its failure."""
        self._lookout.follow(None)
        self._lookout.failing_since = None

    def fail(self, error: BaseException, report: Report, folder: Path | None) -> None:
        """Report that this process failed, and tell the others; waits until they are told.

        An error that comes from the end of another process waits for the lookout to hear of that.
        Then this process leaves, and the call does not return.

        Args:
            error: What was raised.
            report: What to write.
            folder: Where to; None: only on stderr.
        """
        if not self._is_at_work():
            return
        lookout = self._lookout
        if leaving.comes_from_elsewhere(error):
            lookout.leaves_at_once = True
            lookout.wake()
            time.sleep(_EXPLAIN_SECONDS)
            lookout.leaves_at_once = False
        self._reported = error
        lookout.failed_fits.add(self._fits)
        lookout.failing_since = time.monotonic()
        lookout.tell({"kind": "failed", "fit": self._fits, "text": report.cause})
        leaving.publish(report, folder)

    def close(self) -> None:
        """Tell the others that this process ends in order, and stop to watch."""
        if self._pid != os.getpid() or self._closed:
            return
        self._closed = True
        self._lookout.close()
        self._finalizer.cancel()
        if sys.excepthook == self._hook:
            sys.excepthook = self._hook_before

    def _is_at_work(self) -> bool:
        return self._pid == os.getpid() and not self._lookout.closing

    def _hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Be `sys.excepthook`: what nobody caught ends the process, and so the job."""
        ends = getattr(sys, "last_value", None) is error and self._is_at_work()
        try:
            if ends:  # else somebody only wants it to be printed
                self._fail_for_good(error)
        finally:
            self._hook_before(kind, error, trace)
        if ends and not (hasattr(sys, "ps1") or sys.flags.interactive):
            leaving.end_after(error)

    def _fail_for_good(self, error: BaseException) -> None:
        """Report an error that nobody will catch."""
        if not self._is_at_work():
            return
        lookout, cause = self._lookout, leaving.sentence(error)
        if error is not self._reported:
            report = replace(
                lookout.report("error", cause, process=self._rank),
                error=reports.error_parts(error),
                hint=reports.hint_for(type(error).__name__, str(error)),
                memory=reports.memory(),
                secondary=leaving.is_secondary(error),
            )
            self.fail(error, report, lookout.folder)
        lookout.failing_since = time.monotonic()
        lookout.tell({"kind": "failed", "fit": 0, "text": cause})

    def _finish(self) -> None:
        """End where Python runs the finalizers of `multiprocessing`: in order, or failing."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = (error.__context__ or error) if error.code else None
        if error is not None:
            self._fail_for_good(error)
        elif not failed():
            self.close()
