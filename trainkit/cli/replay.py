"""`trainkit replay`: make a step of a run once more, and open it."""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.basics.launch_environment import MIXED_PRECISIONS
from trainkit.basics.outputs import absolute, fetched, is_address
from trainkit.errors import ConfigError
from trainkit.journal import read

_DESCRIPTION = (
    "Start the program of a run again, let it go from the newest checkpoint to a step, with the "
    "same data, random streams and state, and open that step. Nothing of the run is changed."
)
_TAKES_VALUE = ("-W", "-X")  # options of Python


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "replay",
        description=_DESCRIPTION,
        usage="trainkit replay RUN (--step N | --until-nonfinite) [--process P] [-- COMMAND ...]",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="the `output_dir` of a run")
    parser.add_argument("--step", metavar="N", type=int, help="which update, from 1 on")
    process_help = "the process to open (default: all; a table of the first)"
    parser.add_argument("--process", metavar="P", type=int, help=process_help)
    until_help = "go on to the first value that is not finite, and say where it comes from"
    parser.add_argument("--until-nonfinite", action="store_true", help=until_help)
    command_help = "start this instead of what the journal says"
    parser.add_argument("command", nargs="*", help=command_help)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.step is None and not options.until_nonfinite:
        raise ConfigError("Say what to look for: `--step N`, or `--until-nonfinite`.")
    if is_address(options.folder):
        options.folder = fetched(absolute(options.folder, "RUN", stored=True))
    journal = read(options.folder)
    if not options.command and journal.path.stat().st_uid not in (0, getattr(os, "getuid", int)()):
        raise ConfigError(
            f"`{journal.path}` is another user's, and says which command to start. Look at it, and "
            "pass the command yourself: `trainkit replay RUN --step N -- python train.py`."
        )
    if options.step is not None:
        journal.check_reached(options.step)
    record = None if options.step is None else journal.record_of(options.step)
    header = journal.header if record is None else journal.header_of(record)
    with tempfile.TemporaryDirectory(prefix="trainkit-") as temporary:
        answer = Path(temporary) / "answer.json"
        asked = {
            "run": str(options.folder.resolve()),
            "step": options.step,
            "process": options.process,
            "until_nonfinite": options.until_nonfinite,
            "leaves": str(answer),
        }
        command = _command(header, options.command)
        environment = os.environ | _environment(header) | {"TRAINKIT_REPLAY": json.dumps(asked)}
        print(f"trainkit: starting `{shlex.join(command)}`", flush=True)
        code = subprocess.run(command, cwd=_folder(header), env=environment, check=False).returncode
        if not answer.is_file():
            if code == 0:
                print("trainkit: the program ended, and made no training.", file=sys.stderr)
            return code or 1
        return int(json.loads(answer.read_bytes())["is_equal"] is False)


def _command(header: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """Return what starts the run again, all its processes on this machine."""
    words = list(given) or header["start"].get("command")
    if words is None:
        raise ConfigError(
            "The run was made in a notebook or at a prompt, so nobody can start it again. Call "
            "`trainer.replay(model, loaders, step=...)` there, with all else as for `fit`; or pass "
            "a program: `trainkit replay RUN --step N -- python train.py`."
        )
    if any("(hidden)" in word for word in words):
        raise ConfigError(
            f"The journal does not hold the secrets of the command `{' '.join(words)}`. Pass it "
            "whole: `trainkit replay RUN --step N -- python train.py ...`."
        )
    if given or not header["start"]["launched"]:
        return words
    python, *rest = words
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] in _TAKES_VALUE else 1]
    if not rest or rest[0] == "-c":
        raise ConfigError(
            f"The command `{' '.join(words)}` has no script that could be started on several "
            "processes. Pass one: `trainkit replay RUN --step N -- trainkit launch ...`."
        )
    size = header["run"]["processes"]
    launch = [python, "-m", "trainkit.cli", "launch", "--standalone", "--num_processes", str(size)]
    launch += ["--num_machines", "1"]
    launch += ["--cpu"] if header["run"]["device"] == "cpu" else []
    launch += ["--use_fsdp"] if header["run"]["strategy"] == "fsdp" else []
    return [*launch, *rest]


def _environment(header: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that decide on the numbers."""
    names = {ours: theirs for theirs, ours in MIXED_PRECISIONS.items()}
    precision = names.get(header["run"]["precision"])
    variables = {"OMP_NUM_THREADS": str(header["start"]["threads"])}
    variables |= {"TRAINKIT_MIXED_PRECISION": precision} if precision else {}
    return variables | ({"TRAINKIT_USE_CPU": "true"} if header["run"]["device"] == "cpu" else {})


def _folder(header: Mapping[str, Any]) -> str:
    folder: str = header["start"]["folder"] or "."
    if not Path(folder).is_dir():
        raise ConfigError(
            f"The run was started in `{folder}`, which does not exist here. Make it, or call "
            "`trainer.replay` in a program."
        )
    return folder
