"""Every setting of a job: its name, what it may be, and where it may be given.

One table serves the options of `launch`, `config` and `test`, the keys of configuration files
and the environment variables.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from trainkit.basics.launch_environment import MIXED_PRECISIONS
from trainkit.basics.parsing import boolean, one_of
from trainkit.basics.setting_readers import (
    gpu_ids,
    listen_port,
    pairs,
    port_range,
    seconds,
    text,
    whole,
)
from trainkit.errors import ConfigError
from trainkit.launch.accelerate_keys import GPUS_OF_OTHERS

DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")


def _distributed_type(value: object) -> str:
    """Read how processes share the work; GPUs of all makers are GPUs."""
    is_gpu = str(value).strip().upper() in GPUS_OF_OTHERS
    return "MULTI_GPU" if is_gpu else one_of(*DISTRIBUTED_TYPES)(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a job.

    Args:
        name: Its name in files and, behind `--`, on the command line.
        default: Its value where nobody says anything; None: it depends on others.
        read: Checks and converts what was given.
        metavar: What stands for its value in `--help`; empty for a switch.
        other: A second option with the same meaning.
        accelerate: Whether `ACCELERATE_<NAME>` is read too, and set for the processes.
    """

    name: str
    default: Any
    read: Callable[[object], Any]
    help: str
    metavar: str = ""
    other: str = ""
    accelerate: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that give its default, the first one that is set."""
        name = self.name.upper()
        return (f"TRAINKIT_{name}", *((f"ACCELERATE_{name}",) if self.accelerate else ()))

    @property
    def option(self) -> str:
        """The option of the command line, as `--help` shows it."""
        return f"--{self.other or self.name}"

    def checked(self, value: object, where: str) -> Any:
        """Return a value as it is used."""
        try:
            return self.read(value)
        except ValueError as error:
            raise ConfigError(f"`{self.name}` {where} must be {error}, but is {value!r}.") from None


def _setting(
    default: Any, read: Callable[[object], Any], help: str, metavar: str = "", **more: Any
) -> Any:
    return field(default=default, metadata={"read": read, "help": help, "metavar": metavar, **more})


# fmt: off
@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """The settings of a job."""

    use_cpu: bool = _setting(
        False, boolean, "train on the CPU, hide the GPUs", other="cpu", accelerate=True)
    num_processes: int | None = _setting(
        None, whole(1), "processes on all machines together (default: one for each GPU, else 1)",
        "N")
    num_machines: int = _setting(1, whole(1), "machines", "N")
    min_machines: int | None = _setting(
        None, whole(1), "fewest machines to go on with, where they come and go (default: all); "
        "`--num_machines 1:4` says both", "N")
    machine_rank: int = _setting(0, whole(0), "number of this machine, from 0", "N")
    main_process_ip: str | None = _setting(
        None, text, "address of machine 0, for the others", "HOST")
    main_process_port: int | None = _setting(
        None, listen_port, "port on machine 0 (default: the first of --ports, else 29500; any free "
        "one for one machine)", "PORT")
    ports: str | None = _setting(
        None, port_range, "listen only at these, such as 29500-29520 (default: any free ones)",
        "FIRST-LAST")
    meeting_timeout: float = _setting(
        60.0, seconds, "seconds in which all machines must have come", "S")
    rdzv_backend: str = _setting(
        "static", one_of("static", "c10d"),
        "has no effect, as machines meet in one way; for files of accelerate", "NAME")
    rdzv_conf: str | None = _setting(
        None, pairs, "for torch's rendezvous, where machines come and go; else no effect",
        "KEY=VALUE")
    gpu_ids: str = _setting("all", gpu_ids, "GPUs of this machine to use, such as 0,1", "IDS")
    mixed_precision: str = _setting(
        "no", one_of(*MIXED_PRECISIONS),
        "no, fp16, bf16 or fp8: what `Trainer()` and `Accelerator()` take unless told", "NAME",
        accelerate=True)
    distributed_type: str | None = _setting(
        None, _distributed_type, f"one of {', '.join(DISTRIBUTED_TYPES)}", "NAME")
    gradient_accumulation_steps: int | None = _setting(
        None, whole(1), "micro-batches for an update: what `Accelerator()` takes unless told", "N",
        accelerate=True)
    num_cpu_threads_per_process: int | None = _setting(
        None, whole(1), "OMP_NUM_THREADS (default: cores shared out, unless that is set)", "N")
    max_restarts: int = _setting(0, whole(0), "times to start all again after a failure", "N")
    monitor_interval: float = _setting(0.1, seconds, "seconds between looks at the processes", "S")
    shutdown_timeout: int = _setting(
        300, whole(1), "seconds that processes get to save after a signal, before they are killed",
        "S")
    role: str = _setting("default", text, "name of the processes in torch's log", "NAME")
    log_dir: str | None = _setting(None, text, "folder for torch's log files", "DIR")
    tee: str = _setting(
        "0", one_of("0", "1", "2", "3"),
        "copy output to files in log_dir: 1 stdout, 2 stderr, 3 both", "N")
    report_dir: str | None = _setting(
        None, text, "folder for reports of failures (default: a temporary one)", "DIR")
    debug: bool = _setting(False, boolean, "show torch's own log; check collectives")
    # fmt: on

    @property
    def is_elastic(self) -> bool:
        """Whether machines may come and go."""
        return (self.min_machines or self.num_machines) < self.num_machines


def least_and_most(machines: str) -> dict[str, str]:
    """Return `num_machines` as it is, or as torchrun writes it: 1:4 says the fewest too."""
    least, colon, most = machines.partition(":")
    return {"min_machines": least, "num_machines": most} if colon else {"num_machines": machines}


SETTINGS = {
    each.name: Setting(each.name, each.default, **each.metadata) for each in fields(JobSettings)
}
"""The settings by name."""
