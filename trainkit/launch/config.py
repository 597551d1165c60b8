"""`trainkit config`: answer questions once, for `trainkit launch` to read."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError
from trainkit.launch import accelerate_keys, config_file
from trainkit.launch.machine import gpu_count
from trainkit.launch.plan import processes_here
from trainkit.launch.resolving import add_options, gathered, parts
from trainkit.launch.settings import SETTINGS, JobSettings

_DESCRIPTION = """Write a YAML file that `trainkit launch` reads.

It asks for what no option gives. The keys are those of `accelerate config`. The file is
$TRAINKIT_CONFIG, or default_config.yaml in ~/.config/trainkit, unless --config_file names
another one."""

# With the values that accelerate's own reader asks for.
_CONSTANT = {
    "compute_environment": "LOCAL_MACHINE",
    "main_training_function": "main",
    "same_network": True,
}


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "config",
        description=_DESCRIPTION,
        usage="trainkit config [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--default", action="store_true", help="ask nothing: take the defaults")
    parser.add_argument("--force", action="store_true", help="overwrite a file that exists")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    given = gathered(options)
    path = Path(options.config_file) if options.config_file else config_file.default_path()
    is_asking = not options.default
    if is_asking and not sys.stdin.isatty():
        raise ConfigError(
            "There is no terminal to ask questions on. Pass `--default`, and an option for every "
            "answer that is not the default one."
        )
    if path.exists() and not options.force:
        question = f"{path} exists. Overwrite it? [no] "
        if not (is_asking and _input(question).lower() in ("y", "yes")):
            raise ConfigError(f"`{path}` exists. Pass `--force` to overwrite it.")
    values = _answers(given) if is_asking else {**_defaults(given), **given}
    processes_here(JobSettings(**values))  # as `launch` will
    written = {**_CONSTANT, **values}
    for name in accelerate_keys.SECTIONS:
        prefix = name.removesuffix("config")
        own = accelerate_keys.OF_DEEPSPEED if prefix == "deepspeed_" else ()
        words = parts(options).items()
        told = {key: word for key, word in words if key.startswith(prefix) or key in own}
        accelerate_keys.section(name, told, "on the command line")
        written |= {name: told} if told else {}
    config_file.write(path, {k: v for k, v in written.items() if v is not None})
    print(f"wrote {path}")
    return 0


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path | None = None
) -> Path | bool:
    """Write the file that fits this machine; return it, or False where there is one.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        save_location: The file; by default the one where `trainkit launch` looks.
    """
    path = config_file.default_path() if save_location is None else Path(save_location)
    precision = SETTINGS["mixed_precision"].checked(mixed_precision, "(`write_basic_config`)")
    if path.exists():
        print(f"`{path}` exists and stays as it is.")
        return False
    config_file.write(path, {**_CONSTANT, **_defaults({}), "mixed_precision": precision})
    return path


def _defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what fits this machine, where no option says otherwise."""
    machines: int = given.get("num_machines", 1)
    gpus = 0 if given.get("use_cpu") else gpu_count()
    processes: int = given.get("num_processes", max(1, gpus) * machines)
    kind = "NO" if processes == 1 else "MULTI_GPU" if gpus else "MULTI_CPU"
    kind = given.get("distributed_type", kind)
    return {
        "debug": False,
        "distributed_type": kind,
        "gpu_ids": "all",
        "machine_rank": 0,
        "mixed_precision": "no",
        "num_machines": machines,
        "num_processes": processes,
        "rdzv_backend": "static",
        "use_cpu": kind == "MULTI_CPU" or (kind == "NO" and gpus == 0),
    }


def _answers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for what is not given, in an order in which answers decide on later questions."""
    values = dict(given)

    def ask(name: str, question: str, default: Any = None) -> Any:
        if name not in values:
            values[name] = _ask(question, SETTINGS[name].read, default)
        return values[name]

    on_gpus = not ask("use_cpu", "Train on the CPU, even where there are GPUs?", gpu_count() == 0)
    machines = ask("num_machines", "How many machines?", 1)
    if machines > 1:
        ask("machine_rank", "Which of them is this one, counted from 0?", 0)
        ask("main_process_ip", "What is the address of machine 0?")
        ask("main_process_port", "Which port of machine 0 is free?", 29500)
    each = max(1, gpu_count()) if on_gpus else 1
    ask("num_processes", "How many processes, on all machines together?", each * machines)
    if on_gpus:
        ask("gpu_ids", "Which GPUs of this machine (all, or such as 0,1)?", "all")
    ask("mixed_precision", "Which precision (no, fp16, bf16, fp8)?", "no")
    if values["num_processes"] > 1 and "distributed_type" not in values:
        shards = _ask(
            "Share the model out over the processes (FSDP)?", SETTINGS["debug"].read, False
        )
        values["distributed_type"] = "FSDP" if shards else "MULTI_GPU" if on_gpus else "MULTI_CPU"
    return {**_defaults(values), **values}


def _ask(question: str, read: Callable[[object], Any], default: Any) -> Any:
    """Ask until the answer can be read."""
    shown = ("no", "yes")[default] if isinstance(default, bool) else default
    while True:
        answer = _input(f"{question} " if default is None else f"{question} [{shown}] ")
        if not answer and default is not None:
            return default
        try:
            return read(answer)
        except ValueError as error:
            print(f"The answer must be {error}.")


def _input(question: str) -> str:
    try:
        return input(question).strip()
    except EOFError:
        raise ConfigError(
            "The input has ended before the last answer. No file is written."
        ) from None
