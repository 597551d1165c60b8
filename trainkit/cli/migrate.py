"""`trainkit migrate`: rewrite the imports of scripts that were written for Accelerate."""

import argparse
import difflib
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainkit.basics.outputs import why
from trainkit.basics.written_files import replace_file
from trainkit.errors import ConfigError

_DESCRIPTION = """Rewrite the imports of scripts that were written for Accelerate.

Prints what changes, as a diff, and what cannot be rewritten, with its line. The exit code is 0 if
nothing is left to be done by hand, else 1."""


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "migrate", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = "a script, or a folder with all scripts in it"
    parser.add_argument("scripts", metavar="SCRIPT", nargs="+", type=Path, help=what)
    parser.add_argument("--write", action="store_true", help="change the files")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    clean = [_migrate(path, options.write) for path in _scripts(options.scripts)]
    if not clean:
        raise ConfigError("There is no Python file in what was given. Name scripts.")
    return 0 if all(clean) else 1


def _scripts(given: Sequence[Path]) -> Iterator[Path]:
    """Yield each file once; of folders those that are neither hidden nor installed."""
    seen = set()
    for path in given:
        inside = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for each in inside:
            parts = each.relative_to(path).parts
            hidden = any(part.startswith(".") or part == "site-packages" for part in parts)
            if each.resolve() not in seen and not (hidden and path.is_dir()):
                seen.add(each.resolve())
                yield each


def _migrate(path: Path, write: bool) -> bool:
    """Print what changes in a file, and change it; return whether nothing is left."""
    from trainkit.accelerate_compat.migration import migrated

    try:
        if path.suffix == ".ipynb":  # which would pass for a Python dictionary
            raise ConfigError(
                f"`{path}` is a notebook, which stays as it is. Change its imports by hand: "
                "`import trainkit.accelerate_compat as accelerate`."
            )
        migration = migrated(path.read_bytes(), str(path))
        before, after = (
            each.decode(errors="replace").splitlines(keepends=True)
            for each in (migration.before, migration.after)
        )
        sys.stdout.writelines(_ended(difflib.unified_diff(before, after, str(path), str(path))))
        if write and migration.before != migration.after:
            real = path.resolve()  # what a link leads to, which stays one
            mode = stat.S_IMODE(real.stat().st_mode)
            replace_file(real, migration.after)
            os.chmod(real, mode)
    except ConfigError as error:
        print(f"trainkit: {error}", file=sys.stderr)
        return False
    except OSError as error:
        print(f"trainkit: `{path}` stays as it is: {why(path, error)}.", file=sys.stderr)
        return False
    for line, sentence in migration.left:
        print(f"{path}:{line}: {sentence}", file=sys.stderr)
    return not migration.left


def _ended(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
