"""What is known about a job before it starts, and who said so."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trainkit.basics import starters
from trainkit.errors import ConfigError
from trainkit.launch import accelerate_keys, config_file
from trainkit.launch.settings import SETTINGS, JobSettings, Setting, least_and_most

COMMAND_LINE, ENVIRONMENT, DEFAULT = "command line", "environment", "default"
_KINDS = {"multi_gpu": "MULTI_GPU", "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED"}
_SWITCH = {"action": "store_const", "const": "true"}
EXPLICIT = (COMMAND_LINE, ENVIRONMENT)  # a file may say it for another job


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings of a job with the place that each came from.

    Args:
        sources: Where each one was said, by name.
        file: The configuration file that was read; None if there was none.
        variables: Environment variables on sharding and compiling.
    """

    job: JobSettings
    sources: Mapping[str, str]
    file: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, value and source of each setting."""
        shown = {each.name: getattr(self.job, each.name) for each in fields(self.job)}
        for key in filter(self.sources.__contains__, accelerate_keys.PARTS):
            shown[key] = self.variables[accelerate_keys.variable(key)]
        return [(k, "-" if v is None else str(v), self.sources[k]) for k, v in shown.items()]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--config_file` and an option for each setting; hyphens may stand for underscores."""
    _add(parser, "--config_file", dest="config_file", metavar="FILE", help="YAML file to read")
    for setting in SETTINGS.values():
        _add_setting(parser, setting)
    for option, kind in _KINDS.items():
        how: dict[str, Any] = {"action": "store_const", "const": kind, "dest": "distributed_type"}
        _add(parser, f"--{option}", help=f"the same as --distributed_type {kind}", **how)
    for key in accelerate_keys.PARTS:
        how = _SWITCH if key.startswith(("dynamo_use_", "use_")) else {"metavar": "WORD"}
        _add(parser, f"--{key}", dest=key, help="as in a file of accelerate", **how)
    for key in accelerate_keys.NO_EFFECT:
        _add(parser, f"--{key}", dest=key, help=None, **_SWITCH)
    for key, word in accelerate_keys.HARMLESS.items():
        _add(parser, f"--{key}", dest=key, help=None, type=str.lower, choices=(word,))


def _add_setting(parser: argparse.ArgumentParser, setting: Setting) -> None:
    names = [setting.option, *([f"--{setting.name}"] if setting.other else [])]
    if setting.metavar:
        default = "" if setting.default is None else f" (default: {setting.default})"
        said = f"{setting.help}{default}"
        _add(parser, *names, dest=setting.name, metavar=setting.metavar, help=said)
        return
    _add(parser, *names, dest=setting.name, action="store_const", const=True, help=setting.help)
    off = [f"--no_{name.removeprefix('--')}" for name in names]
    _add(parser, *off, dest=setting.name, action="store_const", const=False, help=None)


def _add(parser: argparse.ArgumentParser, *names: str, help: str | None, **arguments: Any) -> None:
    """Add an option; only its first spelling is shown, and none without `help`."""
    spellings = [*names, *(f"--{name[2:].replace('_', '-')}" for name in names)]
    shown = spellings[:1] if help is not None else []
    hidden = [name for name in dict.fromkeys(spellings) if name not in shown]
    if shown:
        parser.add_argument(*shown, help=help, default=None, **arguments)
    if hidden:
        parser.add_argument(*hidden, help=argparse.SUPPRESS, default=None, **arguments)


def parts(options: argparse.Namespace) -> dict[str, str]:
    """Return what the command line says on sharding and compiling, by option."""
    given = {key: getattr(options, key) for key in accelerate_keys.PARTS}
    return {key: value for key, value in given.items() if value is not None}


def gathered(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line has, checked, by name."""
    given = {name: getattr(options, name) for name in SETTINGS}
    given |= least_and_most(given["num_machines"]) if given["num_machines"] else {}
    return {
        name: SETTINGS[name].checked(value, "on the command line")
        for name, value in given.items()
        if value is not None
    }


def resolve(options: argparse.Namespace, env: Mapping[str, str] = os.environ) -> Resolved:
    """Put the settings together: command line, file, environment, starter, default.

    Raises:
        ConfigError: A value cannot be, the file cannot be used, or each task of a starter would
            start a job.
    """
    given = gathered(options)
    path = config_file.find(options.config_file, env)
    file = None if path is None else config_file.read(path)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        variable = next((each for each in setting.variables if env.get(each)), None)
        if name in given:
            values[name], sources[name] = given[name], COMMAND_LINE
        elif file is not None and name in file.values:
            values[name], sources[name] = file.values[name], f"{path}:{file.lines[name]}"
        elif variable is not None:
            source = f"in the environment variable {variable}"
            values[name] = setting.checked(env[variable], source)
            sources[name] = f"{ENVIRONMENT} ({variable})"
    is_alone = getattr(options, "standalone", False) or (
        values.get("num_machines") == 1 and sources["num_machines"].startswith(EXPLICIT)
    )
    _ask_starter(values, sources, env, is_alone)
    job = JobSettings(**values)
    variables = _variables(job, parts(options), file, env, sources)
    return Resolved(job, sources, path, variables)


def _variables(
    job: JobSettings,
    given: Mapping[str, str],
    file: config_file.ConfigFile | None,
    env: Mapping[str, str],
    sources: dict[str, str],
) -> dict[str, str]:
    """Return what the processes are told on sharding and compiling; add to `sources` who did."""
    result = {} if file is None else dict(file.variables)
    on = {switch: job.distributed_type == kind for switch, kind in _KINDS.items()}
    for key, (_, default) in accelerate_keys.PARTS.items():
        name = accelerate_keys.variable(key)
        needs = "use_fsdp" if name.startswith("FSDP_") else ""
        needs = "use_deepspeed" if key in accelerate_keys.OF_DEEPSPEED else needs
        needs = "use_parallelism_config" if name.startswith("PARALLELISM_") else needs
        on["use_parallelism_config"] = result.get(accelerate_keys.GROUPS) == "true"
        if needs and not on[needs]:
            result.pop(name, None)
            if key in given:
                raise ConfigError(f"`--{key}` has no effect without `--{needs}`. Pass that too.")
        elif key in given:
            result |= accelerate_keys.part(key, given[key], "on the command line")
            sources[key] = COMMAND_LINE
        elif file is not None and name in result:
            sources[key] = str(file.path)
        elif word := env.get(name):
            result |= accelerate_keys.part(key, word, f"in the environment variable {name}")
            sources[key] = f"{ENVIRONMENT} ({name})"
        elif default:
            result[name], sources[key] = default, DEFAULT
    if job.distributed_type != "DEEPSPEED":
        result.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    said = [key for key in accelerate_keys.OF_DEEPSPEED if key in sources]
    if "deepspeed_config_file" in said and len(said) > 1:
        raise ConfigError(
            f"`{said[1]}` is said beside `deepspeed_config_file`, which says it. Write it there."
        )
    return result


def _ask_starter(
    values: dict[str, Any], sources: dict[str, str], env: Mapping[str, str], is_alone: bool
) -> None:
    """Add what a starter says and nobody else, and the defaults; `is_alone`: the job is here."""
    for name, (text, who) in _starter_settings(env).items():
        if name not in values and not (is_alone and name in (*_PLACE, "min_machines")):
            values[name], sources[name] = SETTINGS[name].checked(text, f"({who})"), who
            if name == "num_processes":
                values[name] *= values.get("num_machines", 1)
    for name, setting in SETTINGS.items():
        if name not in values:
            values[name], sources[name] = setting.default, DEFAULT
    if values["num_machines"] == 1 and not is_alone:
        _check_alone(env)


_PLACE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""The settings that say which machine of how many this is, and where they meet."""

# What torchrun reads; PyTorchJob and TrainJob set them in pods.
_TORCHRUN = {
    **dict(zip(_PLACE, ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"), strict=True)),
    "num_processes": "NPROC_PER_NODE",
    **{name: name.upper() for name in ("rdzv_endpoint", "rdzv_backend", "rdzv_conf", "max_restarts",
                                       "monitor_interval", "role", "log_dir", "tee")},
}  # fmt: skip


def _starter_settings(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return settings that starters say, by name: the text, and who says it.

    `num_processes` is that of each machine.
    """
    settings: dict[str, tuple[str, str]] = {}
    said, which = starters.in_torchrun_words(env), _which(env)
    if which and "PET_NNODES" not in env and said.get("LOCAL_WORLD_SIZE") == "1":
        words = zip(_PLACE, ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"), strict=True)
        settings = {name: (said[word], which) for name, word in words if word in said}
    for name, word in _TORCHRUN.items():
        if text := env.get(f"PET_{word}"):
            says = least_and_most(text) if name == "num_machines" else {name: text}
            if name == "rdzv_endpoint":
                host, _, port = text.partition(":")
                says = {"main_process_ip": host, **({"main_process_port": port} if port else {})}
            settings |= {k: (v, f"environment (PET_{word})") for k, v in says.items()}
    if settings.get("num_processes", ("",))[0] in ("auto", "gpu"):  # `launch` counts GPUs itself
        del settings["num_processes"]
    return settings


def _which(env: Mapping[str, str]) -> str:
    """Return in words which task this is; empty where it is none of several."""
    said = starters.in_torchrun_words(env)
    is_one = "RANK" in said and said.get("WORLD_SIZE", "1") != "1"
    return f"task {said['RANK']} of {said['WORLD_SIZE']}" if is_one else ""


def _check_alone(env: Mapping[str, str]) -> None:
    """Check that no other launcher is started together with this one, for a job of one machine."""
    if which := _which(env):
        raise ConfigError(
            f"This launcher is {which}, and each would start a job of its own, which trains on all "
            "the data. Start one on each machine (`srun --ntasks-per-node=1 trainkit launch ...`, "
            "`mpirun --map-by ppr:1:node trainkit launch ...`), or the script as the tasks (`srun "
            "python SCRIPT`). If each is to be a job of its own, pass `--num_machines 1`."
        )
