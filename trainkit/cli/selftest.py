"""`trainkit test`: start the processes of a job, and check that they work together here."""

import argparse
import sys
from typing import Any

from trainkit.cli.launch import start
from trainkit.cli.plan import Script, make_plan
from trainkit.cli.resolving import add_options, resolve

__all__ = ["add_to"]

_DESCRIPTION = """Check that the processes of a job work together here: collectives, precision,
training steps that equal those of one process, a checkpoint and a resume. Takes the options of
`launch`. On several machines run it on all, in a folder that they share."""


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser("test", description=_DESCRIPTION, usage="trainkit test [options]")
    add_options(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    resolved = resolve(options)
    plan = make_plan(resolved, Script(path="trainkit.cli.checks", is_module=True))
    for note in plan.notes:
        print(f"trainkit: {note}", file=sys.stderr)
    code = start(plan, resolved)
    if code:
        print(f"trainkit test: FAILED (exit code {code})", file=sys.stderr)
    return code
