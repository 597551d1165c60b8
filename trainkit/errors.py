"""The errors that trainkit raises: one base class, and one class for each kind of cause."""

from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "MOST_NAMED",
    "CheckpointCorrupt",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "NonFiniteError",
    "TrainkitError",
    "by_process",
    "listed",
    "named",
    "quoted",
    "text_of",
]


class TrainkitError(Exception):
    """The base class of every error that trainkit raises on purpose.

    Attributes:
        origin: The process on which it arose, where it is not this one, which was only told.
    """

    origin: int | None = None


class ConfigError(TrainkitError, ValueError):
    """A setting, an argument or a call that cannot work: said as early as it shows."""


class DataError(TrainkitError, ValueError):
    """A data set, loader or batch that does not hold what was promised."""


class DistributedError(TrainkitError, RuntimeError):
    """Processes that disagree, or a collective that only some of them would call."""


class NonFiniteError(TrainkitError, ArithmeticError):
    """A loss or gradient that is NaN or infinite.

    Args:
        message: What was found, where, and what to do.
        step: Updates applied before the bad one.
        process: Rank of the process that saw it.
        parameter: Name of the first bad parameter, where known.
    """

    def __init__(
        self, message: str, *, step: int, process: int, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.process = process
        self.parameter = parameter


class CheckpointError(TrainkitError, RuntimeError):
    """A checkpoint that cannot be written, found, read or used.

    Args:
        message: What happened, where, and what to do.
        path: The checkpoint, or the folder that checkpoints are in.
        file: Name of the file inside `path` that is at fault, where it is one.
        errno: Number of the operating system's error, where it was one.
    """

    def __init__(
        self,
        message: str,
        *,
        path: Path | None = None,
        file: str | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.file = file
        self.errno = errno


class CheckpointMissing(CheckpointError):
    """Where a checkpoint was looked for, none was ever completed."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint that is not what was once written; nothing of it has been used."""


def quoted(names: Sequence[str]) -> str:
    """Return names for a message, in backticks; of more than five the first."""
    return ", ".join(f"`{name}`" for name in names[:5]) + (", ..." if len(names) > 5 else "")


MOST_NAMED = 10
"""How many processes a message names at most."""


def listed(numbers: Sequence[object]) -> str:
    """Return numbers for a message; of more than ten the first."""
    more = f", ... ({len(numbers)} in all)" if len(numbers) > MOST_NAMED else ""
    return ", ".join(map(str, numbers[:MOST_NAMED])) + more


def named(ranks: Sequence[int]) -> str:
    """Return processes for a message; of more than ten the first."""
    return f"process {listed(ranks)}" if len(ranks) == 1 else f"processes {listed(ranks)}"


def by_process(values: Sequence[object]) -> str:
    """Return what each process has, for a message; of many the first process with each value."""
    ranks = list(range(len(values)))
    if len(ranks) > MOST_NAMED:
        ranks = [values.index(value) for value in dict.fromkeys(values)][:MOST_NAMED]
    rest = len(values) - len(ranks)
    more = f"; and {rest} more processes" if rest else ""
    return "; ".join(f"process {rank}: {values[rank]}" for rank in ranks) + more


def text_of(error: BaseException) -> str:
    """Return `str(error)`, also of an error that has a `__str__` which fails."""
    try:
        return str(error)
    except Exception as another:
        return f"(its `__str__` raised {type(another).__name__})"
