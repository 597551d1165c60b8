"""What the main thread has of the watch over the processes of a job (rule 32)."""

import faulthandler
import multiprocessing.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from trainkit.basics.signals import is_failing
from trainkit.distributed import Processes
from trainkit.distributed.collectives import first_with
from trainkit.distributed.watch import Progress
from trainkit.watch import exit, report as reports, timing
from trainkit.watch.connections import Address, Links, open_server, reach_server
from trainkit.watch.hints import tells_of_lost_peer
from trainkit.watch.member import Member
from trainkit.watch.monitor import WatchThread
from trainkit.watch.report import Report
from trainkit.watch.where import ThisProcess, call_of


def start_watch(processes: Processes) -> "JobWatch | None":
    """Return the watch of this process, at work; None where the others cannot be reached.

    Every process must call it.
    """
    here = Member.this().machine  # not gathered: each process would get those of all
    one_machine = first_with(processes, here != processes.broadcast_object(here)) is None
    watch = told = None
    if processes.is_main:
        try:
            links, address = open_server(processes.size, one_machine=one_machine)
            told = list(astuple(address))
            watch = JobWatch(processes, links)  # it serves the others
        except OSError as error:
            exit.say(
                f"trainkit: process 0 cannot listen for the others: {error}. No process is "
                "watched: if one fails, the others may wait until a collective times out."
            )
    told = processes.broadcast_object(told)
    if told is None:
        return None
    if not processes.is_main:
        watch = _reach(processes, Address(*told))
    processes.barrier()  # process 0 must not end before all have come
    return watch


def _reach(processes: Processes, address: Address) -> "JobWatch | None":
    rank, why = processes.rank, ""
    try:
        links = reach_server(address, rank, processes.size)
        if links is not None:
            return JobWatch(processes, links)
    except OSError as error:
        why = f": {error}"
    exit.say(
        f"trainkit: process {rank} cannot reach process 0 at {address.host}, port {address.port}"
        f"{why}. If another process fails, it may wait for it until a collective times out. Allow "
        "connections between the machines, and enough open files."
    )
    return None


def tell_of_failure(
    error: BaseException, processes: Processes, place: dict[str, Any], output_dir: Path | None
) -> None:
    """Write a report of an error, and tell the other processes.

    Does not return where the error only came from the end of another process, which is the one
    that reports.

    Args:
        place: Where the run was: `step`, `epoch`, `phase`, `samples`.
        output_dir: Of the run.
    """
    report = reports.of_error(error, processes.rank, processes.size, place)
    folder = reports.folder_for(output_dir)
    if isinstance(processes.watch, JobWatch):
        processes.watch.fail(error, report, folder)
    elif folder is not None:
        with suppress(OSError):  # the error itself is what matters
            report.write(folder)


class JobWatch:
    """Ends this process when another one of the job fails, and tells the others when it fails.

    A thread of its own does so, also while the main thread sits in a collective; see `WatchThread`.
    The methods are for the main thread. In a fork they do nothing.
    """

    def __init__(self, processes: Processes, links: Links) -> None:
        self._this = this = ThisProcess(processes, links)
        self._pid = os.getpid()
        self._fits = 0  # how many were begun
        self._followed: list[Progress] = []  # each inside the one before
        self._reported: BaseException | None = None
        self._closed = False
        with suppress(Exception):  # there may be no real stderr
            if not faulthandler.is_enabled():
                faulthandler.enable()
        self._hook_before = sys.excepthook
        sys.excepthook = self._hook
        # Children of `multiprocessing` run no `atexit`.
        self._finalizer = multiprocessing.util.Finalize(None, self._finish, exitpriority=100)
        self._monitor = WatchThread(this)
        self.callers = self._monitor.callers

    @contextmanager
    def following(self, watched: Progress) -> Iterator[None]:
        """Watch the progress of a run too, inside; whoever called it may go on after an error."""
        self._fits += 1
        self._followed.append(watched)
        self._monitor.follow(watched)
        folder, output_dir = self._monitor.folder, watched.output_dir
        if output_dir is not None and folder is not None and "TRAINKIT_ADDRESS" in os.environ:
            with suppress(OSError):  # for the launcher, which leaves the report of the job there
                (folder / "output_dir").write_text(str(output_dir))
        try:
            yield
        finally:
            self._followed.pop()
            self._monitor.follow(self._followed[-1] if self._followed else None)
            self._monitor.failing_since = None

    def fail(self, error: BaseException, report: Report, folder: Path | None) -> None:
        """Report that this process failed, and tell the others; waits until they are told.

        An error that comes from the end of another process waits for the monitor to hear of that.
        Then this process leaves, and the call does not return.

        Args:
            folder: Where to; None: only on stderr.
        """
        if not self._is_at_work():
            return
        monitor = self._monitor
        if tells_of_lost_peer(error):
            is_first = self._this.is_first_without()
            if monitor.hears():
                # Not every process has a connection that breaks: the first that has one speaks. Who
                # is told anything meanwhile leaves; what process 0 hears it may pass on late.
                monitor.leaves_at_once = True
                self._this.links.wake()
                time.sleep(timing.EXPLAIN * (1 if is_first else 2))
                monitor.leaves_at_once = False
                is_first = True  # if another had spoken, this one would have left
            report = self._left_behind(report, error, secondary=not is_first)
            error.add_note(f"trainkit: {report.cause}. {report.hint}")
        self._reported = error
        monitor.failed_fits.add(self._fits)
        self._say_failed(self._fits, report.cause)
        exit.publish(report, folder)

    def fail_for_good(self, error: BaseException) -> None:
        """Report an error that nobody will catch."""
        this = self._this
        if self._is_at_work():
            report = reports.of_error(error, this.rank, this.size, this.run_place())
            if error is not self._reported:
                self.fail(error, report, self._monitor.folder)
            self._say_failed(0, report.cause)

    def close(self, outcome: str = "left the job by `close`") -> None:
        """Tell the others that this process ends in order, and `outcome`; stop to watch."""
        if self._is_at_work():
            self._closed = True
            self._monitor.close(outcome)
            self._finalizer.cancel()
            if sys.excepthook == self._hook:
                sys.excepthook = self._hook_before

    def _say_failed(self, fit: int, cause: str) -> None:
        """Tell the others in which fit this process failed; 0: nobody will catch it."""
        self._monitor.failing_since = time.monotonic()
        self._monitor.tell({"kind": "failed", "fit": fit, "text": cause})

    def _left_behind(self, report: Report, error: BaseException, *, secondary: bool) -> Report:
        """Return a report that says who has ended in order, if that is why a collective broke."""
        if not self._this.ended:
            return report
        who, how = next(iter(self._this.ended.items()))
        return replace(
            report,
            cause=f"process {who} {how} while the others wait in {call_of(error)}",
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

    def _finish(self) -> None:
        """End where Python runs the finalizers of `multiprocessing`: in order, or failing."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = (error.__context__ or error) if error.code else None
        if error is not None:
            self.fail_for_good(error)
        elif not is_failing():
            self.close("ended with code 0")
