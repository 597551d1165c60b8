"""Look after the processes of this machine, until they have ended or the job has."""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from trainkit.basics.console import put
from trainkit.basics.signals import CAUGHT, EXIT_LATER, exit_code
from trainkit.distributed.group import SECRET
from trainkit.distributed.watch import EXIT_OTHER_FAILED
from trainkit.errors import DistributedError
from trainkit.launch.link import ASKED, FAILED, LOST, End, JobEnded
from trainkit.launch.machine import INTERFACE_VARIABLES
from trainkit.launch.meeting import Meeting
from trainkit.launch.orphan_killer import OrphanKiller
from trainkit.launch.plan import Plan
from trainkit.launch.workers import Attempt, Workers, described, shell_code
from trainkit.watch.listening import ADDRESS_VARIABLE
from trainkit.watch.report import FOLDER_VARIABLE, read_all

MACHINE_LOST_SECONDS = 4
"""What processes get from SIGTERM on, where a machine is gone."""

_FAILED_SECONDS = 26  # the same where a process has failed
_LEAVE_SECONDS = 4.0  # in which they leave by themselves, with a report, as their watch knows too
_TOLD_SECONDS = 2.0  # in which the launcher of the process that failed first has said so
_LOOK_SECONDS = 1.0
_SIGNALS = (*CAUGHT, signal.SIGHUP, signal.SIGQUIT)
_STARTUP = str(Path(__file__).with_name("startup"))  # has a file for Python to import at first
_SAVED = {exit_code(signum): signum for signum in CAUGHT}
"""The codes of processes that were asked to end, and have saved: they are not started again."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the processes of this machine ended.

    Args:
        code: What the launcher exits with.
        reports: The folder with the reports of the last attempt.
        failures: Rank to what happened, for processes that failed.
        endings: The same for processes that had ended with code 0.
        was_asked: Whether they have ended on request.
    """

    code: int
    reports: Path
    failures: Mapping[int, str] = field(default_factory=dict)
    endings: Mapping[int, str] = field(default_factory=dict)
    was_asked: bool = False


def supervise(plan: Plan, meeting: Meeting, orphan_killer: OrphanKiller) -> Outcome:
    """Start the processes of this machine and wait for their end.

    A signal is passed on to them, and they get the time of the plan to end; a second one is passed
    on too, a third one kills them. Nothing that was started here is left when this returns.

    Args:
        plan: What to start; its environment becomes that of this process.
        orphan_killer: What ends the processes when this one is killed.

    Raises:
        DistributedError: The processes cannot be started.
    """
    os.environ.update(_environment(plan, meeting))
    if not plan.job.debug:
        logging.disable(logging.ERROR)  # the reports say it better
    supervisor = _Supervisor(plan, meeting, orphan_killer)
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    try:
        return supervisor.run()
    finally:
        supervisor.workers.kill()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _environment(plan: Plan, meeting: Meeting) -> dict[str, str]:
    """Return the variables of the processes; for the interfaces what the user says comes first."""
    environment = {**plan.environment, ADDRESS_VARIABLE: meeting.own}
    if not plan.script.is_program:
        path = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([_STARTUP, *([path] if path else [])])
    if meeting.interface is not None:
        for name, prefix in INTERFACE_VARIABLES.items():
            environment[name] = os.environ.get(name) or prefix + meeting.interface
    return environment


class _Asked(Exception):
    """A signal has come while there are no processes."""


class _Supervisor:
    def __init__(self, plan: Plan, meeting: Meeting, orphan_killer: OrphanKiller) -> None:
        self._folder = Path(plan.environment[FOLDER_VARIABLE])
        self._reports = self._folder / "attempt-0"
        self.workers = Workers(plan, str(self._folder / "log"))
        self._plan, self._job, self._seconds = plan, plan.job, plan.job.shutdown_timeout
        self._meeting, self._link = meeting, meeting.link
        self._name = meeting.link.name(meeting.machine)
        self._orphan_killer = orphan_killer
        self._secret = os.environ.get(SECRET)  # the user's, which does not travel
        self._restarts = self._job.max_restarts
        self._signals: list[int] = []
        self._early: list[int] | None = None  # those that came while processes are being started
        self._waits = True  # for the other machines, with no processes
        self._left: set[int] = set()  # ranks here that have ended with code 0
        self._looked = 0.0

    def run(self) -> Outcome:
        end: End | None = None  # why the job ends before all is done
        try:
            for signum in _SIGNALS:
                signal.signal(signum, self._on_signal)
            while end is None and not self._link.is_over:
                self._start(self._meeting.begin())
                end = self._watch()
        except _Asked:
            end = self._tell_asked()
        except JobEnded as ended:
            end = ended.args[0]
        self._waits = False
        outcome = Outcome(0, self._reports) if end is None else self._end_with(end)
        if outcome.code == EXIT_LATER or not outcome.was_asked:
            self._meeting.shut()
        return outcome

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on; a second one ends a training at once, a third one kills all."""
        self._signals.append(signum)  # before the rest: signals may come one inside the other
        if self._waits:
            self._waits = False
            raise _Asked
        if self._early is not None:
            self._early.append(signum)
            return
        self.workers.send(signal.SIGKILL if len(self._signals) > 2 else signum)

    def _start(self, attempt: Attempt) -> None:
        self._early, self._attempt = [], attempt
        self._waits = False
        self._left.clear()
        if attempt.number:
            most = self._job.max_restarts
            put(f"trainkit: restart {attempt.number} of at most {most}", file=sys.stderr)
        self._reports = self._folder / f"attempt-{attempt.number}"
        os.environ[FOLDER_VARIABLE] = str(self._reports)
        os.environ[SECRET] = self._secret or self._link.secret
        try:
            self._reports.mkdir(parents=True, exist_ok=True)
            self.workers.start(attempt)
        except SignalException as error:  # by the handlers that torch sets
            self._on_signal(error.sigval, None)
        except (RuntimeError, OSError) as error:
            text = str(error).split("\n", 1)[0]
            raise DistributedError(f"The processes could not be started: {text}") from error
        finally:
            for signum in _SIGNALS:
                signal.signal(signum, self._on_signal)
        self._orphan_killer.hold(self.workers.groups())
        early, self._early = self._early, None
        for each in early:
            self.workers.send(each)

    def _watch(self) -> End | None:
        """Look after the processes until the job ends, all is over, or all are to start again."""
        has_told = False
        while not self._link.is_over:  # another machine may fail yet
            time.sleep(self._job.monitor_interval)
            self.workers.kill_stopped()
            codes = self.workers.codes()
            self._look_for_absent({rank for rank, code in codes.items() if code == 0})
            if self._signals:
                return self._tell_asked()
            if self._link.end is not None:
                return self._link.end
            if failed := {rank: code for rank, code in codes.items() if code}:
                return self._on_failure(failed)
            if self._meeting.wants_restart(self._attempt):
                self._start_again(counts=not self._meeting.is_elastic)
                return None
            if not has_told and None not in codes.values():
                has_told = True
                self._link.tell("finished", self._attempt.number)
        return None

    def _look_for_absent(self, left: set[int]) -> None:
        """End the job where a process has ended well, but others wait for it: they would for ever.

        Machine 0 knows who has come.
        """
        if left != self._left:
            self._left = left
            self._link.tell("left", sorted(left))
        now = time.monotonic()
        if not self._link.left or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        rank = self._meeting.absent(self._link.left)
        if rank is not None:
            machine = rank // self._plan.processes
            cause = f"process {rank} on {self._link.name(machine)} ended with code 0 before it "
            self._link.tell_end(FAILED, f"{cause}came to the others, which wait for it", 1)

    def _on_failure(self, failed: Mapping[int, int]) -> End | None:
        """Let all start again, or return why the job ends."""
        codes = set(failed.values())
        saved = _SAVED.keys() & codes
        if self._meeting.is_elastic:  # other signals let a machine come or leave
            saved &= {EXIT_LATER}
        if self._meeting.is_elastic and codes <= _SAVED.keys() - {EXIT_LATER}:
            self._start_again(counts=False)
            return None
        if self._restarts and not saved:
            self._start_again(counts=True)
            return None
        first = _not_told(failed)
        if not first and self._meeting.size > 1:
            self._link.wait(lambda: self._link.end, _TOLD_SECONDS)  # of the one that failed first
        rank, code = next(iter((first or failed).items()))
        cause = f"process {rank} on {self._name} {described(failed)[rank]}"
        told = [each for _, each in read_all(self._reports) if each.process == rank]
        cause += f": {told[0].cause}" if told else ""
        if saved == codes:
            return self._link.tell_end(ASKED, cause, code, _SAVED[code])
        code = 1 if code == EXIT_OTHER_FAILED else shell_code(code)
        return self._link.tell_end(FAILED, cause, code)

    def _start_again(self, *, counts: bool) -> None:
        """End the processes; where a machine comes or leaves they have the time to save."""
        self.workers.end(_FAILED_SECONDS if counts else self._seconds)
        self._restarts -= counts
        self._waits = True

    def _tell_asked(self) -> End:
        signum = signal.Signals(self._signals[0])
        put(
            f"trainkit: {signum.name}: the processes have {self._seconds} s to save and end; "
            "send it again to end them at once, a third time to kill them",
            file=sys.stderr,
            flush=True,
        )
        cause = f"{self._name} was asked to end ({signum.name})"
        return self._link.tell_end(ASKED, cause, exit_code(signum), signum)

    def _end_with(self, end: End) -> Outcome:
        """End the processes, and return how they did."""
        if end.signum:
            return self._end_on_request(end.signum)
        if end.machine != self._meeting.machine:
            self.workers.wait(_LEAVE_SECONDS, kills_stopped=True)
        codes = {rank: code for rank, code in self.workers.codes().items() if code is not None}
        seconds = MACHINE_LOST_SECONDS if end.kind == LOST else _FAILED_SECONDS
        self.workers.end(min(self._seconds, seconds))
        failures = described(_not_told({rank: code for rank, code in codes.items() if code}))
        well = described({rank: code for rank, code in codes.items() if code == 0})
        return Outcome(end.code, self._reports, {**failures, **self.workers.stopped}, well)

    def _end_on_request(self, signum: int) -> Outcome:
        """Wait until the processes have saved; return the code of one that did not end by that."""
        if not self._signals:  # which were passed on
            self.workers.send(signum)
        self.workers.wait(self._seconds)
        self.workers.kill()
        codes = {rank: code or 0 for rank, code in self.workers.codes().items()}
        saved = exit_code(signum)
        others = {r: c for r, c in codes.items() if c not in (0, -signum, saved)}
        # One that has saved counts more than one that was still too young to do so.
        ended = [saved] if saved in codes.values() or not codes else [*codes.values()]
        first = [*others.values()][:1] or ended
        late = "had not ended when the time was up, and was killed"
        failures = {
            rank: late if others[rank] == -signal.SIGKILL else text
            for rank, text in described(others).items()
        }
        return Outcome(max(map(shell_code, first)), self._reports, failures, was_asked=True)


def _not_told(codes: Mapping[int, int]) -> dict[int, int]:
    """Return the codes of processes that were not told to end."""
    told = (-signal.SIGTERM, exit_code(signal.SIGTERM), EXIT_OTHER_FAILED)
    return {rank: code for rank, code in codes.items() if code not in told}
