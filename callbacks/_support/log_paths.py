"""Where loggers write."""

from pathlib import Path

from trainkit.basics.outputs import absolute
from trainkit.errors import ConfigError
from trainkit.training.run import Run


def log_place(run: Run, given: str | Path | None, name: str, *, owner: str, argument: str) -> Path:
    """Return `given`, or else `name` in the run's output directory."""
    if given is not None:
        return run.place(absolute(given, argument))
    if run.output_dir is None:
        raise ConfigError(
            f"`{owner}` does not know where to write: it was given no `{argument}` and the "
            f'trainer no `output_dir`. Pass `Trainer(output_dir="...")` or '
            f'`{owner}({argument}="...")`.'
        )
    return run.output_dir / name


def move_away(*paths: Path) -> None:
    """Rename the files of an older run, all by the same number; empty ones may be written on."""
    if any(path.is_file() and path.stat().st_size > 0 for path in paths):
        number = free_number(*paths)
        for path in paths:
            if path.exists():
                path.rename(path.with_name(f"{path.name}.{number}"))


def free_number(*paths: Path) -> int:
    """Return the first number from 1 on that is behind no path, as in `metrics.jsonl.1`."""
    number = 1
    while any(path.with_name(f"{path.name}.{number}").exists() for path in paths):
        number += 1
    return number
