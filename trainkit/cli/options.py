"""Every setting of a job: its name, what it may be, and where it may be given.

One table serves the options of `launch`, `config` and `test`, the keys of configuration files
and the environment variables.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.cli import values

__all__ = ["DISTRIBUTED_TYPES", "SETTINGS", "Setting"]

DISTRIBUTED_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a job.

    Args:
        name: Its name in files and, behind `--`, on the command line.
        read: Checks and converts what was given.
        help: What it means, for `--help`.
        default: Its value where nobody says anything; None: it depends on others.
        metavar: What stands for its value in `--help`; empty for a switch.
        other: A second option with the same meaning.
        accelerate: Whether the variable `ACCELERATE_<NAME>` is read too.
    """

    name: str
    read: Callable[[object], Any]
    help: str
    default: Any = None
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


_TABLE = (
    Setting("use_cpu", values.boolean, "train on the CPU, hide the GPUs", False,
            other="cpu", accelerate=True),
    Setting("num_processes", values.whole(1),
            "processes on all machines together (default: one for each GPU, else 1)", metavar="N"),
    Setting("num_machines", values.whole(1), "machines", 1, "N"),
    Setting("machine_rank", values.whole(0), "number of this machine, from 0", 0, "N"),
    Setting("main_process_ip", values.text, "address of machine 0, for the others", metavar="HOST"),
    Setting("main_process_port", values.listen_port,
            "port on machine 0 (default: 29500; any free one for one machine)", metavar="PORT"),
    Setting("rdzv_backend", values.one_of("static", "c10d"),
            "how machines meet: static (they are numbered) or c10d (any order; can restart)",
            "static", "NAME"),
    Setting("rdzv_conf", values.pairs, "more for the rendezvous", metavar="KEY=VALUE"),
    Setting("gpu_ids", values.gpu_ids, "GPUs of this machine to use, such as 0,1", "all", "IDS"),
    Setting("mixed_precision", values.one_of("no", "fp16", "bf16"),
            "no, fp16 or bf16: what `Trainer()` and `Accelerator()` take unless told",
            "no", "NAME", accelerate=True),
    Setting("distributed_type", values.one_of(*DISTRIBUTED_TYPES),
            f"one of {', '.join(DISTRIBUTED_TYPES)}", metavar="NAME"),
    Setting("gradient_accumulation_steps", values.whole(1),
            "micro-batches for an update: what `Accelerator()` takes unless told", metavar="N",
            accelerate=True),
    Setting("num_cpu_threads_per_process", values.whole(1),
            "OMP_NUM_THREADS (default: cores shared out, unless that is set)", metavar="N"),
    Setting("max_restarts", values.whole(0), "times to start all again after a failure", 0, "N"),
    Setting("monitor_interval", values.seconds, "seconds between looks at the processes", 0.1, "S"),
    Setting("shutdown_timeout", values.whole(1),
            "seconds that processes get to save after a signal, before they are killed", 300, "S"),
    Setting("role", values.text, "name of the processes in torch's log", "default", "NAME"),
    Setting("log_dir", values.text, "folder for torch's log files", metavar="DIR"),
    Setting("tee", values.one_of("0", "1", "2", "3"),
            "copy output to files in log_dir: 1 stdout, 2 stderr, 3 both",
            "0", "N"),
    Setting("report_dir", values.text, "folder for reports of failures (default: a temporary one)",
            metavar="DIR"),
    Setting("debug", values.boolean, "show torch's own log; check collectives", False),
)  # fmt: skip

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}
"""The settings by name."""
