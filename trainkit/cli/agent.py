"""Run the processes of this machine by torch's elastic agent, and tell how they ended."""

import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig
from typing_extensions import override

from trainkit.cli.orphan_killer import OrphanKiller
from trainkit.cli.plan import Plan
from trainkit.console import put
from trainkit.distributed.group import SECRET
from trainkit.errors import DistributedError
from trainkit.signals import CAUGHT, exit_code
from trainkit.watchdog.exit import EXIT_OTHER_FAILED
from trainkit.watchdog.report import FOLDER_VARIABLE
from trainkit.watchdog.stalls import Member

__all__ = ["Outcome", "run"]

_KILL_SECONDS = 5
_LEAST_TIMEOUT = 1
_LOOK_PAUSE, _STOPPED_LOOKS = 4.0, 12
_SIGNALS = (*CAUGHT, signal.SIGHUP, signal.SIGQUIT)
# A run that was asked to end has saved, and must not be started again by the agent.
_ENDED_ON_REQUEST = frozenset(exit_code(signum) for signum in CAUGHT)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the processes of this machine ended.

    Args:
        code: What the launcher exits with.
        failures: Rank to what happened, for processes that failed.
        reports: The folder with the reports of the last attempt.
        endings: The same for processes that have ended with code 0.
    """

    code: int
    failures: Mapping[int, str] = field(default_factory=dict)
    reports: Path | None = None
    endings: Mapping[int, str] = field(default_factory=dict)


def run(plan: Plan, *, shows_log: bool = False) -> Outcome:
    """Start the processes of this machine and wait for their end.

    A signal is passed on to them, and they get the time of the plan to end; a second one is passed
    on too, a third one kills them. Nothing that was started here is left when this returns.

    Args:
        plan: What to start; its environment becomes that of this process.
        shows_log: Show torch's own log.

    Raises:
        DistributedError: The machines do not come together, or were told different things.
    """
    os.environ.update(plan.environment)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = plan.environment["PET_SIGNALS_TO_HANDLE"]
    options = torchrun.parse_args(list(plan.arguments))  # type: ignore[no-untyped-call]
    if options.nnodes == "1":  # gloo would listen for the whole network, too
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ.setdefault(SECRET, secrets.token_hex(16))
    options.log_dir = options.log_dir or str(Path(plan.environment[FOLDER_VARIABLE]) / "log")
    config, command, arguments = torchrun.config_from_args(options)
    if not shows_log:
        logging.disable(logging.ERROR)  # the reports say it better
    timeout = config.shutdown_timeout or _LEAST_TIMEOUT
    orphan_killer = OrphanKiller(timeout)
    spec = _spec(config, command, arguments)
    agent = _Agent(spec, config.logs_specs, plan, orphan_killer, timeout)
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    try:
        result = agent.run()
        spec.rdzv_handler.shutdown()  # other machines start nothing any more
        return _outcome(agent, result)
    except SignalException as error:
        return _interrupted(agent, error.sigval)
    except DistributedError:
        raise
    except (RendezvousError, RuntimeError) as error:
        raise DistributedError(
            f"The processes could not be started: {error}\nCheck that all machines run the same "
            "command, but for `--machine_rank`, and reach `main_process_ip` at its port."
        ) from error
    finally:
        agent.kill()
        orphan_killer.release()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _spec(config: LaunchConfig, command: Any, arguments: list[str]) -> WorkerSpec:
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    handler: Any = get_rendezvous_handler(parameters)
    host, port = None, None
    if config.rdzv_backend == "static":
        host, _, number = config.rdzv_endpoint.rpartition(":")
        port = int(number)
        if config.max_nodes == 1:  # torch would listen for the whole network
            listening = socket.create_server((host, port)).detach()
            handler._store = TCPStore(host, port, is_master=True, master_listen_fd=listening)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        rdzv_handler=handler,
        entrypoint=command,
        args=tuple(arguments),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=host,
        master_port=port,
        local_addr=config.local_addr,
    )


class _Agent(LocalElasticAgent):
    """Torch's agent; compares the machines, keeps reports apart by attempt, leaves nobody."""

    def __init__(
        self, spec: WorkerSpec, logs: Any, plan: Plan, orphan_killer: OrphanKiller, timeout: int
    ) -> None:
        super().__init__(spec, logs, shutdown_timeout=timeout)
        self._plan = plan
        self._orphan_killer = orphan_killer
        self._attempt = -1  # the number of the present attempt, from 0
        self._looked_at = 0.0
        self._stopped_at: dict[int, int] = {}  # looks in a row that found a process stopped
        self.stopped: dict[int, str] = {}  # processes that were killed for it, by rank
        self._was_asked_to_end = False
        self._was_asked_again = False

    @property
    def reports(self) -> Path:
        """The folder with the reports of the present attempt."""
        return Path(self._plan.environment[FOLDER_VARIABLE]) / f"attempt-{max(0, self._attempt)}"

    @override
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._attempt += 1
        if self._attempt:
            most = worker_group.spec.max_restarts
            put(f"trainkit: restart {self._attempt} of at most {most}", file=sys.stderr)
        self.reports.mkdir(parents=True, exist_ok=True)
        os.environ[FOLDER_VARIABLE] = str(self.reports)
        _compare(worker_group, self._plan.agreed, self._attempt)
        started: dict[int, Any] = super()._start_workers(worker_group)
        self._orphan_killer.hold(handler.proc.pid for handler in self._handlers().values())
        return started

    def _look_for_stopped(self) -> None:
        """Kill a process that the kernel has not run at many looks, some seconds apart.

        What others of its machine would find by `trainkit.watchdog.silence` it may have nobody for.
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
        result: RunResult = super()._monitor_workers(worker_group)
        if any(failure.exitcode in _ENDED_ON_REQUEST for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result

    @override
    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if isinstance(sys.exception(), SignalException) and not self._was_asked_to_end:
            self._was_asked_to_end = True
            for signum in _SIGNALS:  # torch's handlers would leave this function
                signal.signal(signum, self._ask_again)
            put(
                f"trainkit: {death_sig.name}: the processes have {timeout} s to save and end; "
                "send it again to end them at once, a third time to kill them",
                file=sys.stderr,
                flush=True,
            )
        super()._shutdown(death_sig, timeout)

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
        """Return the exit code of each process of this machine, None of those that run."""
        return {rank: handler.proc.poll() for rank, handler in self._handlers().items()}

    def endings(self) -> dict[int, str]:
        """Return how each process of this machine ended by itself, by its rank in the job."""
        codes, workers = self.codes(), self._worker_group.workers
        ranks = {worker.local_rank: int(worker.global_rank) for worker in workers}
        return {ranks[local]: _described(code) for local, code in codes.items() if code == 0}

    def kill(self) -> None:
        """Kill what is left of the processes of this machine."""
        if None in self.codes().values():
            self._send(signal.SIGKILL)
            for handler in self._handlers().values():
                handler.proc.wait(_KILL_SECONDS)


def _compare(worker_group: WorkerGroup, agreed: Mapping[str, str], attempt: int) -> None:
    """Raise on all machines if they were told different things."""
    group: Any = worker_group  # its fields are declared as None
    store, size, rank = group.store, group.group_world_size, group.group_rank
    if size == 1:
        return
    prefix = f"trainkit/settings/{attempt}"
    store.set(f"{prefix}/{rank}", json.dumps(dict(agreed)))
    told = [json.loads(store.get(f"{prefix}/{other}")) for other in range(size)]
    # The store lives in machine 0, which therefore goes on last.
    store.set(f"{prefix}/read/{rank}", "1")
    if rank == 0:
        store.wait([f"{prefix}/read/{other}" for other in range(size)])
    names = sorted({name for settings in told for name in settings})
    lines = [
        f"  {name}: " + ", ".join(f"{told[m].get(name, '-')} (machine {m})" for m in range(size))
        for name in names
        if len({settings.get(name) for settings in told}) > 1
    ]
    if lines:
        raise DistributedError("\n".join(["The machines were told different things:", *lines]))


def _outcome(agent: _Agent, result: RunResult) -> Outcome:
    if not result.failures:
        return Outcome(int(result.state != WorkerState.SUCCEEDED), reports=agent.reports)
    codes = {rank: failure.exitcode for rank, failure in sorted(result.failures.items())}
    told = (-signal.SIGTERM, exit_code(signal.SIGTERM), EXIT_OTHER_FAILED)
    alone = {rank: code for rank, code in codes.items() if code not in told}
    if alone:
        code = _shell_code(next(iter(alone.values())))
    else:  # the first one may have been told to end while it was about to
        code = 1 if EXIT_OTHER_FAILED in codes.values() else exit_code(signal.SIGTERM)
    failures = {rank: _described(each) for rank, each in (alone or codes).items()}
    return Outcome(code, {**failures, **agent.stopped}, agent.reports, agent.endings())


def _interrupted(agent: _Agent, signum: signal.Signals) -> Outcome:
    """Return how processes ended after a signal: the code of one that did not end by it first."""
    agent.kill()
    codes = agent.codes()
    by_signal = (0, -signum, exit_code(signum))
    others = {rank: code for rank, code in codes.items() if code not in by_signal}
    late = "had not ended when the time was up, and was killed"
    failures = {
        rank: late if code == -signal.SIGKILL else _described(code) for rank, code in others.items()
    }
    if others:
        code = _shell_code(next(iter(others.values())))
    else:
        code = max((_shell_code(code) for code in codes.values()), default=exit_code(signum))
    return Outcome(code, failures, agent.reports)


def _shell_code(code: int | None) -> int:
    """Return an exit code as a shell gives it: 128 + N for a process that signal N killed."""
    return 1 if code is None else code if code >= 0 else 128 - code


def _described(code: int | None) -> str:
    if code is None:
        return "did not end"
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (often: this machine ran out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
