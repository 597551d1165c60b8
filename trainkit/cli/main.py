"""Read the command line, run a command, and turn its errors into a line and an exit code."""

import argparse
import os
import sys
from collections.abc import Sequence

from trainkit.cli import checkpoint
from trainkit.errors import TrainkitError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `trainkit` with these arguments, or those of the process; return the exit code.

    0: all is well. 1: the command found something wrong, or could not do its work. 2: the
    arguments cannot be understood.
    """
    parser = argparse.ArgumentParser(
        prog="trainkit", description="Look after what trainings leave behind."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    checkpoint.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except TrainkitError as error:
        print(f"trainkit: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
