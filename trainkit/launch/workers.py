"""The processes of this machine, which torch starts, in one attempt after the other."""

import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    Std,
    SubprocessContext,
    start_processes,
)

from trainkit.launch.plan import Plan
from trainkit.watch.member import Member

_KILL_SECONDS = 5.0  # in which the kernel has ended what was killed
_PAUSE = 0.05
_LOOK_PAUSE, _STOPPED_LOOKS = 4.0, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Where this machine stands in an attempt.

    Args:
        number: Of the attempt, from 0.
        machine: Its number, from 0.
        address: Of the store of the processes.
    """

    number: int
    machine: int
    machines: int
    address: str
    port: int


class Workers:
    """The processes of this machine.

    Args:
        logs: The folder for their logs, where the plan names none.

    Attributes:
        stopped: What happened to those that were killed because they were stopped, by rank.
    """

    def __init__(self, plan: Plan, logs: str) -> None:
        job = plan.job
        self._plan = plan
        self._logs = DefaultLogsSpecs(log_dir=job.log_dir or logs, tee=Std.from_str(job.tee))
        self._context: SubprocessContext | None = None
        self._processes: dict[int, Popen[Any]] = {}  # by rank
        self._looked = 0.0
        self._stopped_looks: dict[int, int] = {}  # in a row, by rank
        self.stopped: dict[int, str] = {}

    def start(self, attempt: Attempt) -> None:
        """Start them, with the variables that torchrun would give them.

        Raises:
            OSError: That cannot be.
        """
        job, size = self._plan.job, self._plan.processes
        first, self.stopped = attempt.machine * size, {}
        alike = {
            "LOCAL_WORLD_SIZE": size,
            "WORLD_SIZE": size * attempt.machines,
            "GROUP_RANK": attempt.machine,
            "GROUP_WORLD_SIZE": attempt.machines,
            "ROLE_NAME": job.role,
            "ROLE_WORLD_SIZE": size * attempt.machines,
            "MASTER_ADDR": attempt.address,
            "MASTER_PORT": attempt.port,
            "TORCHELASTIC_RESTART_COUNT": attempt.number,
            "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
            "TORCHELASTIC_RUN_ID": "trainkit",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }
        environments = {}
        for local in range(size):
            own = {**alike, "LOCAL_RANK": local, "RANK": first + local, "ROLE_RANK": first + local}
            environments[local] = {name: str(value) for name, value in own.items()}
        program, *arguments = self._plan.command()
        context = start_processes(
            name=job.role,
            entrypoint=program,
            args=dict.fromkeys(range(size), tuple(arguments)),
            envs=environments,
            logs_specs=self._logs,
        )
        assert isinstance(context, SubprocessContext)
        self._context = context
        handlers = context.subprocess_handlers
        self._processes = {first + local: each.proc for local, each in handlers.items()}

    def groups(self) -> list[int]:
        """Return their process groups."""
        return [process.pid for process in self._processes.values()]

    def codes(self) -> dict[int, int | None]:
        """Return the exit code of each by its rank, None of those that run."""
        return {rank: process.poll() for rank, process in self._processes.items()}

    def send(self, signum: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to those that run, or to some, and to all that they have started."""
        for rank, process in self._processes.items():
            if process.poll() is None and (ranks is None or rank in ranks):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)

    def kill_stopped(self, *, at_once: bool = False) -> None:
        """Kill those that the kernel has not run at many looks, some seconds apart, or at this one.

        What others of its machine would find (`trainkit.watch.stall`) one may have nobody for.
        """
        if not at_once and time.monotonic() - self._looked < _LOOK_PAUSE:
            return
        self._looked = time.monotonic()
        running = [
            (rank, each.pid) for rank, each in self._processes.items() if each.poll() is None
        ]
        stopped = [rank for rank, pid in running if Member("", "", pid, "").is_stopped()]
        self._stopped_looks = {rank: self._stopped_looks.get(rank, 0) + 1 for rank in stopped}
        for rank, looks in self._stopped_looks.items():
            if at_once or looks >= _STOPPED_LOOKS:
                self.stopped[rank] = "was stopped (SIGSTOP), and has been killed"
                self.send(signal.SIGKILL, [rank])

    def wait(self, seconds: float, *, kills_stopped: bool = False) -> None:
        """Wait until all have ended, which one that is stopped cannot."""
        end = time.monotonic() + seconds
        while None in self.codes().values() and time.monotonic() < end:
            if kills_stopped:
                self.kill_stopped(at_once=True)
            time.sleep(_PAUSE)

    def end(self, seconds: float) -> None:
        """Ask them to end, and kill those that have not when the time is up."""
        self.send(signal.SIGTERM)
        self.wait(seconds, kills_stopped=True)
        self.kill()

    def kill(self) -> None:
        """Kill those that are left, and close their logs."""
        self.send(signal.SIGKILL)
        self.wait(_KILL_SECONDS)
        if self._context is not None:
            self._context.close(signal.SIGKILL, 0)


def shell_code(code: int) -> int:
    """Return an exit code as a shell gives it: 128 + N for a process that signal N killed."""
    return code if code >= 0 else 128 - code


def described(codes: Mapping[int, int]) -> dict[int, str]:
    """Return how processes ended, in words."""
    return {rank: _described(code) for rank, code in codes.items()}


def _described(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (often: this machine ran out of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
