"""Read the command line, run a command, and turn its errors into a line and an exit code."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from typing_extensions import override

from trainkit.basics.parsing import nearest
from trainkit.basics.run_files import LeftOut
from trainkit.basics.terminal import visibly
from trainkit.cli.addresses import local_copies
from trainkit.errors import TrainkitError
from trainkit.version import __version__

_COMMANDS = {
    "launch": ("launch.command", "start a script on several processes, on one machine or more"),
    "config": ("launch.config", "answer questions once, for `launch` to read"),
    "env": ("cli.env", "print what a report of a bug needs"),
    "test": ("cli.selftest", "check that the processes of a job work together here"),
    "checkpoint": ("cli.checkpoint", "list, verify, show, compare and thin out checkpoints"),
    "diff": ("cli.diff", "say where two runs part, and why"),
    "estimate": ("cli.estimate", "print the memory of a training, from the shapes of its model"),
    "estimate-memory": ("cli.estimate_memory", "the same in the words of Accelerate"),
    "migrate": ("cli.migrate", "rewrite the imports of scripts that were written for Accelerate"),
    "report": ("cli.report", "show what runs did, on one page"),
    "replay": ("cli.replay", "make a step of a run once more, and open it"),
    "runs": ("cli.runs", "list runs: best metrics, steps, time, how they ended, hyperparameters"),
}
"""The module of each command, and what it does."""


class CommandParser(argparse.ArgumentParser):
    """Names the nearest option for an unknown one, and takes no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, rest = super().parse_known_args(args, namespace)
        if "--" in rest and getattr(parsed, "command", None) == []:
            # Before 3.13 argparse has filled a positional of any length before it comes there.
            cut = rest.index("--")
            parsed.command, rest = rest[cut + 1 :], rest[:cut]
        unknown = [each.partition("=")[0] for each in rest if each.startswith("-")]
        if unknown:
            hint = nearest(unknown[0], self._option_string_actions)
            self.error(f"`{unknown[0]}` is no known option.{hint}")
        return parsed, rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `trainkit` with these arguments, or those of the process; return the exit code.

    0: all is well. 1: the command found something wrong, or could not do its work. 2: the
    arguments cannot be understood. `launch` returns the exit code of the processes.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments[0] if arguments else "").parse_args(arguments)
    try:
        with visibly(), warnings.catch_warnings():
            warnings.simplefilter("always", LeftOut)
            warnings.showwarning = partial(_show, warnings.showwarning)
            try:
                with local_copies(options):
                    code: int = options.run(options)
            except TrainkitError as error:
                print(f"trainkit: {error}", file=sys.stderr)
                return 1
            print(end="", flush=True)
            return code
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _show(
    otherwise: Callable[..., None], message: Warning | str, kind: type[Warning], *where: Any
) -> None:
    """Tell what could not be read as all else is told, without the line of the program."""
    if issubclass(kind, LeftOut):
        print(f"trainkit: {message}", file=sys.stderr)
    else:
        otherwise(message, kind, *where)


def _parser(command: str) -> CommandParser:
    """Return the parser; only the module of this command is imported."""
    parser = CommandParser(
        prog="trainkit", description="Start trainings, and look after what they leave behind."
    )
    parser.add_argument("--version", action="version", version=f"trainkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, help_text) in _COMMANDS.items():
        if name == command:
            import_module(f"trainkit.{module}").add_to(commands)
        else:
            commands.add_parser(name, help=help_text)
    return parser
