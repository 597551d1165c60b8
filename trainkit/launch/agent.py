"""Run the processes of this machine by torch's elastic agent, and tell how they ended."""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig
from typing_extensions import override

from trainkit.console import put
from trainkit.distributed.group import SECRET
from trainkit.errors import DistributedError
from trainkit.launch.link import ASKED, FAILED, LOST, JobEnded
from trainkit.launch.machine import INTERFACE_VARIABLES
from trainkit.launch.meeting import Meeting
from trainkit.launch.orphan_killer import OrphanKiller
from trainkit.launch.outcome import Outcome, described, not_told, shell_code
from trainkit.launch.plan import Plan
from trainkit.launch.rendezvous import Rendezvous
from trainkit.signals import CAUGHT, exit_code
from trainkit.watch.exit import EXIT_OTHER_FAILED
from trainkit.watch.listening import ADDRESS_VARIABLE
from trainkit.watch.member import Member
from trainkit.watch.report import FOLDER_VARIABLE

__all__ = ["GRACE_SECONDS", "Agent", "run"]

GRACE_SECONDS = {LOST: 4, FAILED: 26}
"""What processes get from SIGTERM on, where the job ends and no signal has asked for it."""

_LEAVE_SECONDS = 4.0  # in which they leave by themselves, with a report, as their watch knows too

_STARTUP = str(Path(__file__).with_name("startup"))  # has a file for Python to import at first

_TORCHRUN = re.compile(
    "PET_(NNODES|NODE_RANK|NPROC_PER_NODE|RDZV_.*|MASTER_.*|STANDALONE|MODULE|NO_PYTHON|RUN_PATH)"
)
_KILL_SECONDS = 5
_PAUSE = 0.05
_LOOK_SECONDS = 1.0
_ASKED_SECONDS = 30.0  # in which processes end because those of another machine were asked to
_LOOK_PAUSE, _STOPPED_LOOKS = 4.0, 12
_SIGNALS = (*CAUGHT, signal.SIGHUP, signal.SIGQUIT)
# A run that was asked to end has saved, and must not be started again by the agent.
_ENDED_ON_REQUEST = frozenset(exit_code(signum) for signum in CAUGHT)


def run(
    plan: Plan,
    meeting: Meeting,
    orphan_killer: OrphanKiller,
    *,
    shows_log: bool = False,
    meet_by: Callable[[LaunchConfig, Meeting], RendezvousHandler] | None = None,
    kind: "type[Agent] | None" = None,
) -> Outcome:
    """Start the processes of this machine and wait for their end.

    A signal is passed on to them, and they get the time of the plan to end; a second one is passed
    on too, a third one kills them. Nothing that was started here is left when this returns.

    Args:
        plan: What to start; its environment becomes that of this process.
        meeting: The machines of the job.
        orphan_killer: What ends the processes when this one is killed.
        shows_log: Show torch's own log.
        meet_by: Makes what tells torch's agent who takes part; None: the meeting tells it.
        kind: The class of the agent; None: that of this module.

    Raises:
        DistributedError: The processes cannot be started.
    """
    for name in filter(_TORCHRUN.fullmatch, list(os.environ)):
        del os.environ[name]  # the plan has taken from them what nobody else said
    os.environ.update(_environment(plan, meeting))
    options = torchrun.parse_args(list(plan.arguments))  # type: ignore[no-untyped-call]
    options.log_dir = options.log_dir or str(Path(plan.environment[FOLDER_VARIABLE]) / "log")
    config, command, arguments = torchrun.config_from_args(options)
    if not shows_log:
        logging.disable(logging.ERROR)  # the reports say it better
    rendezvous = Rendezvous(meeting) if meet_by is None else meet_by(config, meeting)
    spec = _spec(config, command, arguments, rendezvous)
    agent = (kind or Agent)(spec, config.logs_specs, plan, meeting, orphan_killer)
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    try:
        result = agent.run()
        rendezvous.shutdown()  # nobody starts anything any more
        return _outcome(agent, result)
    except SignalException as error:
        outcome = _interrupted(agent, error.sigval)
        what = _asked(meeting, error.sigval)
        meeting.link.tell_end(ASKED, what, outcome.code)
        return outcome
    except JobEnded as ended:
        agent.kill()
        return Outcome(ended.end.code, agent.reports, agent.stopped, agent.endings())
    except (RuntimeError, OSError) as error:
        text = str(error).split("\n", 1)[0]
        raise DistributedError(f"The processes could not be started: {text}") from error
    finally:
        agent.kill()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _environment(plan: Plan, meeting: Meeting) -> dict[str, str]:
    """Return the variables of the processes; for the interfaces what the user says comes first."""
    found = {**plan.environment, ADDRESS_VARIABLE: meeting.own}
    found["TORCHELASTIC_SIGNALS_TO_HANDLE"] = plan.environment["PET_SIGNALS_TO_HANDLE"]
    found["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from the numbers of machines
    if not plan.script.is_program:
        path = os.environ.get("PYTHONPATH")
        found["PYTHONPATH"] = os.pathsep.join([_STARTUP, *([path] if path else [])])
    if meeting.interface is not None:
        for name, prefix in INTERFACE_VARIABLES.items():
            found[name] = os.environ.get(name) or prefix + meeting.interface
    return found


def _spec(
    config: LaunchConfig, command: Any, arguments: list[str], rendezvous: RendezvousHandler
) -> WorkerSpec:
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=rendezvous,
        entrypoint=command,
        args=tuple(arguments),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
    )


class Agent(LocalElasticAgent):
    """Torch's agent; goes with other machines, keeps reports apart by attempt, leaves nobody."""

    def __init__(
        self,
        spec: WorkerSpec,
        logs: Any,
        plan: Plan,
        meeting: Meeting,
        orphan_killer: OrphanKiller,
    ) -> None:
        timeout = int(plan.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        super().__init__(spec, logs, shutdown_timeout=timeout)
        self._plan = plan
        self._meeting = meeting
        self._link = meeting.link
        self._name = meeting.link.name(meeting.machine)
        self._secret = os.environ.get(SECRET)  # the user's, which does not travel
        self._left: set[int] = set()  # processes that have ended with code 0
        self._looked = 0.0
        self.stopped: dict[int, str] = {}
        self._orphan_killer = orphan_killer
        self._attempt = -1  # the number of the present attempt, from 0
        self._result: RunResult | None = None  # of processes that have ended well
        self._looked_at = 0.0
        self._stopped_at: dict[int, int] = {}  # looks in a row that found a process stopped
        self._was_asked_to_end = False
        self._was_asked_again = False

    @property
    def reports(self) -> Path:
        """The folder with the reports of the present attempt."""
        return Path(self._plan.environment[FOLDER_VARIABLE]) / f"attempt-{max(0, self._attempt)}"

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        self._result = None
        self._left, self.stopped = set(), {}
        if self._attempt:
            most = worker_group.spec.max_restarts
            self._remaining_restarts = most - self._attempt  # also where another machine failed
            put(f"trainkit: restart {self._attempt} of at most {most}", file=sys.stderr)
        self.reports.mkdir(parents=True, exist_ok=True)
        os.environ[FOLDER_VARIABLE] = str(self.reports)
        os.environ[SECRET] = self._secret or self._link.secret
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._orphan_killer.hold(handler.proc.pid for handler in self._handlers().values())
        return started

    def _look_for_stopped(self) -> None:
        """Kill a process that the kernel has not run at many looks, some seconds apart.

        What others of its machine would find by `trainkit.watch.inquiry` it may have nobody for.
        """
        if time.monotonic() - self._looked_at < _LOOK_PAUSE:
            return
        self._looked_at = time.monotonic()
        for rank, handler in self._handlers().items():
            member = Member("", "", handler.proc.pid, "")
            self._stopped_at[rank] = self._stopped_at.get(rank, 0) + 1 if member.is_stopped() else 0
            if self._stopped_at[rank] == _STOPPED_LOOKS:
                seconds = round(_STOPPED_LOOKS * _LOOK_PAUSE)
                text = f"was stopped (SIGSTOP) for {seconds} s, and has been killed"
                self.stopped[int(self._worker_group.workers[rank].global_rank)] = text
                with suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGKILL)

    @override
    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look_for_stopped()
        # Before torch ends the other processes of this machine, which may take its time.
        codes = {rank: code for rank, code in self.codes().items() if code}
        self._judge(codes)
        self._look_for_absent()
        end = self._link.end
        is_asked = end is not None and end.kind == ASKED
        if end and not codes and not (is_asked and time.monotonic() - end.at < _ASKED_SECONDS):
            raise JobEnded(end)
        if self._result is None:
            if codes:
                self._kill_stopped()
            result: RunResult = super()._monitor_workers(worker_group)
            self._judge({rank: failure.exitcode for rank, failure in result.failures.items()})
            if result.state != WorkerState.SUCCEEDED:
                return result
            self._result = result
            self._link.tell("finished", self._attempt)
        # Another machine may fail yet, and all start again.
        is_over = self._link.is_over or end is not None
        return self._result if is_over else RunResult(state=WorkerState.HEALTHY)

    @override
    def _exit_barrier(self) -> None:
        """Do nothing: `_monitor_workers` has waited for the other machines."""

    def _look_for_absent(self) -> None:
        """Fail where a process has ended well, but others wait for it to come: they would for ever.

        Machine 0 knows who has come.
        """
        left = {rank for rank, code in self.codes().items() if code == 0}
        if left != self._left:
            self._left = left
            self._link.tell("left", sorted(left))
        now, meeting = time.monotonic(), self._meeting
        if not self._link.left or now - self._looked < _LOOK_SECONDS or not meeting.has_joined():
            return
        self._looked = now
        for rank in self._link.left:
            if not meeting.has_joined(rank):
                machine = rank // self._worker_group.spec.local_world_size
                cause = f"process {rank} on {self._link.name(machine)} ended with code 0 before it "
                self._link.tell_end(FAILED, f"{cause}came to the others, which wait for it", 1)
                return

    def _judge(self, codes: Mapping[int, int]) -> None:
        """Let the other machines know of processes that have ended, but with code 0.

        None will be started again if they were asked to end, or too many attempts have failed.
        """
        if set(codes.values()) & _ENDED_ON_REQUEST:
            self._remaining_restarts = 0
        if not codes or self._remaining_restarts:
            return
        rank, code = next(iter(not_told(codes).items()), next(iter(codes.items())))
        kind = ASKED if set(codes.values()) <= _ENDED_ON_REQUEST else FAILED
        cause = f"process {rank} on {self._name} {described(code)}"
        self._link.tell_end(kind, cause, 1 if code == EXIT_OTHER_FAILED else shell_code(code))

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if isinstance(sys.exception(), SignalException) and not self._was_asked_to_end:
            self._was_asked_to_end = True
            self._link.tell("asked", _asked(self._meeting, death_sig))
            for signum in _SIGNALS:  # torch's handlers would leave this function
                signal.signal(signum, self._ask_again)
            put(
                f"trainkit: {death_sig.name}: the processes have {timeout} s to save and end; "
                "send it again to end them at once, a third time to kill them",
                file=sys.stderr,
                flush=True,
            )
        else:
            end = self._link.end
            if end is not None:
                timeout = min(timeout, GRACE_SECONDS.get(end.kind, timeout))
                until = time.monotonic() + (_LEAVE_SECONDS if end.kind != ASKED else 0.0)
                while time.monotonic() < until and None in self.codes().values():
                    self._kill_stopped()
                    time.sleep(_PAUSE)
            self._kill_stopped()
        super()._shutdown(death_sig, timeout)

    def _kill_stopped(self) -> None:
        """Kill processes that are stopped, and cannot end by themselves."""
        for rank, handler in zip(self.codes(), self._handlers().values(), strict=True):
            if handler.proc.poll() is None and Member("", "", handler.proc.pid, "").is_stopped():
                self.stopped.setdefault(rank, "was stopped (SIGSTOP), and has been killed")
                with suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, signal.SIGKILL)

    def _ask_again(self, signum: int, frame: FrameType | None) -> None:
        """Pass a second signal on, which ends a training at once; kill all at a third."""
        kills = self._was_asked_again
        self._was_asked_again = True  # before the rest: signals may come one inside the other
        self._send(signal.SIGKILL if kills else signum)

    def _send(self, signum: int) -> None:
        """Send a signal to the processes that run, and to all that they have started."""
        for handler in self._handlers().values():
            with suppress(ProcessLookupError):
                if handler.proc.poll() is None:
                    os.killpg(handler.proc.pid, signum)

    def _handlers(self) -> dict[int, Any]:
        return getattr(self._pcontext, "subprocess_handlers", {})

    def codes(self) -> dict[int, int | None]:
        """Return the exit code of each process of this machine by rank, None of those that run."""
        ranks = {each.local_rank: int(each.global_rank) for each in self._worker_group.workers}
        return {
            ranks.get(local, local): handler.proc.poll()
            for local, handler in self._handlers().items()
        }

    def endings(self) -> dict[int, str]:
        """Return how each process of this machine ended by itself, by its rank in the job."""
        return {rank: described(code) for rank, code in self.codes().items() if code == 0}

    def kill(self) -> None:
        """Kill what is left of the processes of this machine."""
        if None in self.codes().values():
            self._send(signal.SIGKILL)
            for handler in self._handlers().values():
                handler.proc.wait(_KILL_SECONDS)


def _outcome(agent: Agent, result: RunResult) -> Outcome:
    if not result.failures:
        return Outcome(int(result.state != WorkerState.SUCCEEDED), agent.reports)
    codes = {rank: failure.exitcode for rank, failure in sorted(result.failures.items())}
    alone = not_told(codes)
    if alone:
        code = shell_code(next(iter(alone.values())))
    else:  # the first one may have been told to end while it was about to
        code = 1 if EXIT_OTHER_FAILED in codes.values() else exit_code(signal.SIGTERM)
    failures = {rank: described(each) for rank, each in (alone or codes).items()}
    return Outcome(code, agent.reports, {**failures, **agent.stopped}, agent.endings())


def _asked(meeting: Meeting, signum: signal.Signals) -> str:
    return f"{meeting.link.name(meeting.machine)} was asked to end ({signum.name})"


def _interrupted(agent: Agent, signum: signal.Signals) -> Outcome:
    """Return how processes ended after a signal: the code of one that did not end by it first."""
    agent.kill()
    codes = agent.codes()
    by_signal = (0, -signum, exit_code(signum))
    others = {rank: code for rank, code in codes.items() if code not in by_signal}
    late = "had not ended when the time was up, and was killed"
    failures = {
        rank: late if code == -signal.SIGKILL else described(code) for rank, code in others.items()
    }
    if others:
        code = shell_code(next(iter(others.values())))
    else:
        code = max((shell_code(code) for code in codes.values()), default=exit_code(signum))
    return Outcome(code, agent.reports, failures, was_asked=True)
