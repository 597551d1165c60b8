"""Where loggers write."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.errors import ConfigError
from trainkit.outputs import absolute
from trainkit.training.run import Run

__all__ = ["giving_up", "log_place"]


def log_place(run: Run, given: str | Path | None, name: str, *, owner: str, argument: str) -> Path:
    """Return `given`, or else `name` in the run's output directory.

    Args:
        run: The run that is logged.
        given: What the user passed to the logger.
        name: Of the file or folder in the output directory.
        owner: The logger, for the error.
        argument: What `given` is called there.

    Raises:
        ConfigError: Neither is there.
    """
    if given is not None:
        return absolute(given, argument)
    if run.output_dir is None:
        raise ConfigError(
            f"`{owner}` does not know where to write: it was given no `{argument}` and the "
            f'trainer no `output_dir`. Pass `Trainer(output_dir="...")` or '
            f'`{owner}({argument}="...")`.'
        )
    return run.output_dir / name


@contextmanager
def giving_up(
    owner: str, give_up: Callable[[], None], outcome: str = "nothing more is written there"
) -> Iterator[None]:
    """Warn, and call `give_up`, where nothing can be written inside: training is worth more."""
    try:
        yield
    except OSError as error:
        give_up()
        warnings.warn(
            f"`{owner}` cannot write: {error}. Training goes on, and {outcome}.", stacklevel=4
        )
