"""Turn the settings of a job into the command of torch.distributed.run and its environment."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.launch.machine import (
    core_count,
    free_port,
    gpu_count,
    gpu_variable,
    no_gpus,
    port_is_free,
)
from trainkit.launch.resolving import Resolved
from trainkit.launch.settings import JobSettings
from trainkit.watch.listening import PORTS_VARIABLE, ports

__all__ = [
    "Plan",
    "Script",
    "check_here",
    "make_plan",
    "port_of",
    "ports_of",
    "processes_here",
]

_DEFAULT_PORT = 29500
_LAST_CALL = "last_call_timeout=10"  # seconds; torch waits 30 for more machines than it needs
# SIGUSR1 is how schedulers announce the end of the time that a job was given.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What every process runs.

    Args:
        path: A Python file; or a module, or any program.
        is_module: Whether `path` is the name of a module.
        is_program: Whether `path` is a program, started without Python.
    """

    path: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    is_program: bool = False

    def __post_init__(self) -> None:
        if self.is_module and self.is_program:
            raise ConfigError("`--module` and `--no_python` exclude each other. Pass one of them.")
        if self.is_program and shutil.which(self.path) is None:
            raise ConfigError(f"There is no program `{self.path}`. Check its name and its rights.")
        if self.is_module or self.is_program:
            return
        if Path(self.path).is_dir():
            raise ConfigError(f"`{self.path}` is a folder. Name the script in it.")
        if not Path(self.path).is_file():
            raise ConfigError(
                f"There is no script `{self.path}` in `{Path.cwd()}`. For a module pass "
                "`--module`, for another program `--no_python`."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is about to be started on this machine.

    Args:
        arguments: Those of `python -m torch.distributed.run`.
        environment: Variables to set, beside those of this process.
        agreed: What must be equal on all machines.
        script: What the processes run.
        port: Of the store on machine 0.
        notes: What the user should know.
        needs_gpus: GPUs that this machine must have; 0 where none are asked for.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    agreed: Mapping[str, str]
    script: Script
    port: int
    notes: tuple[str, ...] = ()
    needs_gpus: int = 0

    def command(self) -> str:
        """Return the whole as one line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        python = [sys.executable, "-m", "torch.distributed.run", *self.arguments]
        return " ".join([*variables, shlex.join(python)])


@dataclass(frozen=True, slots=True)
class _Local:
    """The processes of this machine."""

    processes: int
    uses_gpus: bool
    notes: tuple[str, ...] = field(default=())


def make_plan(resolved: Resolved, script: Script, env: Mapping[str, str] = os.environ) -> Plan:
    """Return what to start here.

    Raises:
        ConfigError: Settings that exclude each other, or that no machine can meet.
    """
    job = resolved.job
    local = _local(job, env)
    port, notes = _free_port(job)
    machines: tuple[str, ...] = ("--nnodes", str(job.num_machines))
    if job.is_elastic:
        machines = _coming_and_going(job, port)
    elif job.num_machines > 1:
        machines = (*machines, "--node-rank", str(job.machine_rank))
    address = job.main_process_ip if job.num_machines > 1 else "127.0.0.1"
    environment = _environment(resolved, local, env)
    arguments = (
        *machines,
        *("--master-addr", str(address), "--master-port", str(port)),
        *("--nproc-per-node", str(local.processes)),
        *("--max-restarts", str(job.max_restarts)),
        *("--monitor-interval", str(job.monitor_interval)),
        *(("--role", job.role) if job.role != "default" else ()),
        *(("--log-dir", job.log_dir) if job.log_dir else ()),
        *(("--tee", job.tee) if job.tee != "0" else ()),
        *(("--module",) if script.is_module else ("--no-python",) if script.is_program else ()),
        script.path,
        *script.arguments,
    )
    total = local.processes * job.num_machines
    agreed = {"num_processes": str(total), "num_machines": str(job.num_machines)}
    agreed |= {"max_restarts": str(job.max_restarts), "role": job.role}
    agreed |= {k: v for k, v in environment.items() if k.startswith("TRAINKIT_")}
    return Plan(
        arguments=arguments,
        environment=environment,
        agreed=agreed,
        script=script,
        port=port,
        notes=(*local.notes, *notes),
        needs_gpus=local.processes if local.uses_gpus else 0,
    )


def _coming_and_going(job: JobSettings, port: int) -> tuple[str, ...]:
    """Return the arguments for machines that come and go."""
    conf = ",".join([_LAST_CALL, *([job.rdzv_conf] if job.rdzv_conf else [])])
    return (
        *("--nnodes", f"{job.min_machines}:{job.num_machines}"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{job.main_process_ip}:{port}"),
        *("--rdzv-id", "trainkit", "--rdzv-conf", conf),
    )


def processes_here(job: JobSettings) -> int | None:
    """Return how many processes each machine is told to start; None where nobody says it.

    Raises:
        ConfigError: The machines, or the processes on them, cannot be.
    """
    if job.num_processes is not None and job.num_processes % job.num_machines:
        raise ConfigError(
            f"`num_processes` is {job.num_processes}, which cannot be shared out equally over "
            f"{job.num_machines} machines. It counts the processes of all machines together."
        )
    _check_machines(job)
    return None if job.num_processes is None else job.num_processes // job.num_machines


def check_here(plan: Plan, gpus: int) -> None:
    """Check that this machine can do its part.

    Raises:
        ConfigError: It has fewer GPUs than the plan needs.
    """
    if plan.needs_gpus > gpus:
        have = f"{gpus} of them" if gpus else "none"
        raise ConfigError(
            f"Each of the {plan.needs_gpus} processes of this machine needs a GPU of its own, but "
            f"torch sees {have}. Start fewer processes (`--num_processes`), name other GPUs "
            "(`--gpu_ids`), or train on the CPU (`--cpu`)."
        )


def _local(job: JobSettings, env: Mapping[str, str]) -> _Local:
    """Share the processes out over machines, and find out whether they need GPUs."""
    on_cpu = job.use_cpu or job.distributed_type == "MULTI_CPU"
    visible = env if job.gpu_ids == "all" else {**env, gpu_variable(): job.gpu_ids}
    gpus = 0 if on_cpu else gpu_count(visible)
    processes = processes_here(job) or max(1, gpus)
    needs = not on_cpu and (gpus > 0 or job.distributed_type == "MULTI_GPU" or job.gpu_ids != "all")
    named = job.gpu_ids.split(",")
    if needs and job.gpu_ids != "all" and processes > len(named):
        raise ConfigError(
            f"`gpu_ids` names {len(named)} GPU(s), but this machine starts {processes} processes. "
            "Each needs one of its own."
        )
    notes: tuple[str, ...] = ()
    if needs and gpus < processes:
        notes = (f"this machine has {gpus} GPU(s) for {processes} process(es); see `--cpu`",)
    return _Local(processes, needs, notes)


def _check_machines(job: JobSettings) -> None:
    if not 0 <= job.machine_rank < job.num_machines:
        raise ConfigError(
            f"`machine_rank` is {job.machine_rank}, but must be less than `num_machines`, which "
            f"is {job.num_machines}: machines are counted from 0."
        )
    if (job.min_machines or 1) > job.num_machines:
        raise ConfigError(
            f"`min_machines` is {job.min_machines}, but must be at most `num_machines`, which is "
            f"{job.num_machines}."
        )
    if job.rdzv_conf is not None and not job.is_elastic:
        raise ConfigError(
            f"`rdzv_conf` is `{job.rdzv_conf}`, but is for torch's rendezvous, which is not used. "
            "How long machines wait for each other is `--meeting_timeout`."
        )
    port, allowed = job.main_process_port, ports_of(job)
    if port and job.ports is not None and port not in allowed:
        raise ConfigError(
            f"`main_process_port` is {port}, but is none of the `ports` {job.ports}. Leave it out "
            "to take the first of them."
        )
    if job.num_machines == 1:
        return
    if job.main_process_ip is None:
        raise ConfigError(
            f"`num_machines` is {job.num_machines}, so each needs `main_process_ip`: the address "
            "of machine 0 (`--main_process_ip`)."
        )
    if job.main_process_port == 0:
        raise ConfigError(
            "`main_process_port` is 0, any free port, but several machines must know the same. "
            "Name one."
        )


def ports_of(job: JobSettings) -> Sequence[int]:
    """Return the ports that this job may listen at; 0 is any free one."""
    return ports({PORTS_VARIABLE: job.ports or ""})


def port_of(job: JobSettings) -> int:
    """Return the port of machine 0 that the others come to."""
    return job.main_process_port or ports_of(job)[0] or _DEFAULT_PORT


def _free_port(job: JobSettings) -> tuple[int, tuple[str, ...]]:
    """Return the port of the store, and notes on it."""
    if job.num_machines > 1:
        return port_of(job), ()  # the meeting tries it
    allowed = ports_of(job)
    if job.main_process_port and port_is_free(job.main_process_port):
        return job.main_process_port, ()
    port = next((p for p in allowed if p and port_is_free(p)), 0)
    if not port and job.ports is not None:
        raise ConfigError(f"None of the ports {job.ports} of this machine is free. Pass others.")
    port = port or free_port()
    if not job.main_process_port:
        return port, ()
    return port, (f"port {job.main_process_port} is taken; {port} is used instead",)


def _environment(resolved: Resolved, local: _Local, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the processes need beside those of this one."""
    job = resolved.job
    threads = job.num_cpu_threads_per_process or max(1, core_count() // local.processes)
    result = {"OMP_NUM_THREADS": str(threads)}
    if job.num_cpu_threads_per_process is None and env.get("OMP_NUM_THREADS"):
        result["OMP_NUM_THREADS"] = env["OMP_NUM_THREADS"]
    if not local.uses_gpus and (job.use_cpu or job.distributed_type == "MULTI_CPU"):
        result |= no_gpus()
        result["TRAINKIT_USE_CPU"] = "true"
    elif job.gpu_ids != "all":
        result[gpu_variable()] = job.gpu_ids
    result["TRAINKIT_MIXED_PRECISION"] = job.mixed_precision
    if job.gradient_accumulation_steps is not None:
        steps = str(job.gradient_accumulation_steps)
        result["TRAINKIT_GRADIENT_ACCUMULATION_STEPS"] = steps
    if job.distributed_type == "FSDP":
        result |= {"TRAINKIT_STRATEGY": "fsdp", **resolved.fsdp}
    if job.ports is not None:
        result[PORTS_VARIABLE] = job.ports
    # Of a store whose other end is gone, torch shows frames of C++.
    result["TORCH_CPP_LOG_LEVEL"] = env.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    if job.debug:
        del result["TORCH_CPP_LOG_LEVEL"]
        result |= {"TRAINKIT_DEBUG": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    result["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(job.shutdown_timeout)
    result["PET_SIGNALS_TO_HANDLE"] = _SIGNALS
    return result
