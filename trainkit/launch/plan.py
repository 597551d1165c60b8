"""Turn the settings of a job into what each process runs, and its environment."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.launch import accelerate_keys
from trainkit.launch.machine import core_count, gpu_count, gpu_variable, no_gpus
from trainkit.launch.resolving import Resolved
from trainkit.launch.settings import SETTINGS, JobSettings
from trainkit.watch.listening import PORTS_VARIABLE, ports

_DEFAULT_PORT = 29500


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
        job: The settings that it comes from.
        environment: Variables to set, beside those of this process.
        note: What the user should know; empty where there is nothing.
        needs_gpus: GPUs that this machine must have; 0 where none are asked for.
    """

    job: JobSettings
    script: Script
    processes: int
    environment: Mapping[str, str]
    note: str = ""
    needs_gpus: int = 0

    def command(self) -> list[str]:
        """Return what each process runs."""
        script = self.script
        python = [] if script.is_program else [sys.executable, "-u"]
        return [*python, *(["-m"] if script.is_module else []), script.path, *script.arguments]

    def line(self) -> str:
        """Return it for a shell, with the variables, but for `RANK` and `LOCAL_RANK`."""
        job = self.job
        variables = {
            "WORLD_SIZE": self.processes * job.num_machines,
            "LOCAL_WORLD_SIZE": self.processes,
            "MASTER_ADDR": job.main_process_ip if job.num_machines > 1 else "127.0.0.1",
            "MASTER_PORT": port_of(job),
            **self.environment,
        }
        words = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items()]
        return " ".join([*words, shlex.join(self.command())])


def make_plan(resolved: Resolved, script: Script) -> Plan:
    """Return what to start here."""
    job = resolved.job
    if not job.debug:  # of a store whose other end is gone, torch shows frames of C++
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before it is imported
    on_cpu = job.use_cpu or job.distributed_type == "MULTI_CPU"
    names = [] if on_cpu or job.gpu_ids == "all" else job.gpu_ids.split(",")
    told = processes_here(job)
    gpus = 0 if on_cpu else len(names) or gpu_count()
    processes = told or max(1, gpus)
    uses_gpus = not on_cpu and (gpus > 0 or job.distributed_type == "MULTI_GPU")
    if names and processes > len(names):
        raise ConfigError(
            f"`gpu_ids` names {len(names)} GPU(s), but this machine starts {processes} processes. "
            "Each needs one of its own."
        )
    lacks = uses_gpus and gpus < processes
    return Plan(
        job=job,
        script=script,
        processes=processes,
        environment=_environment(resolved, processes, on_cpu=on_cpu, uses_gpus=uses_gpus),
        note=f"this machine has {gpus} GPU(s) for {processes} process(es); see `--cpu`" * lacks,
        needs_gpus=processes if uses_gpus else 0,
    )


def processes_here(job: JobSettings) -> int | None:
    """Return how many processes each machine is told to start; None where nobody says it."""
    if job.num_processes is not None and job.num_processes % job.num_machines:
        raise ConfigError(
            f"`num_processes` is {job.num_processes}, which cannot be shared out equally over "
            f"{job.num_machines} machines. It counts the processes of all machines together."
        )
    _check_machines(job)
    return None if job.num_processes is None else job.num_processes // job.num_machines


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
    port, allowed = job.main_process_port, ports(job.ports)
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


def port_of(job: JobSettings) -> int:
    """Return the port of machine 0 that the others come to, and the first to be tried there."""
    return job.main_process_port or ports(job.ports)[0] or _DEFAULT_PORT


def _environment(
    resolved: Resolved, processes: int, *, on_cpu: bool, uses_gpus: bool
) -> dict[str, str]:
    """Return the variables that the processes need beside those of this one."""
    job = resolved.job
    accelerate_keys.check_groups(
        resolved.variables, job.distributed_type, processes * job.num_machines
    )
    threads = str(job.num_cpu_threads_per_process or max(1, core_count() // processes))
    if job.num_cpu_threads_per_process is None:
        threads = os.environ.get("OMP_NUM_THREADS") or threads
    result = {"OMP_NUM_THREADS": threads, **resolved.variables}
    if on_cpu:
        result |= no_gpus()
    elif job.gpu_ids != "all":
        result[gpu_variable()] = job.gpu_ids
    # Without GPUs, scripts on Accelerate meet on the CPU only where they are told to use it.
    job = replace(job, use_cpu=on_cpu or (not uses_gpus and processes * job.num_machines > 1))
    for setting in SETTINGS.values():
        if setting.accelerate and (said := getattr(job, setting.name)) is not None:
            result |= dict.fromkeys(setting.variables, str(said).lower())
    if job.distributed_type == "FSDP":
        result |= {"TRAINKIT_STRATEGY": "fsdp", "ACCELERATE_USE_FSDP": "true"}
    if job.distributed_type == "DEEPSPEED":
        result["ACCELERATE_USE_DEEPSPEED"] = "true"
    if job.ports is not None:
        result[PORTS_VARIABLE] = job.ports
    if job.debug:
        result |= {"TRAINKIT_DEBUG": "1", "ACCELERATE_DEBUG_MODE": "true"}
        result["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return result
