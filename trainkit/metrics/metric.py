"""The face that every metric shows to the evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

from trainkit.errors import ConfigError, DataError

T = TypeVar("T")

Uses: TypeAlias = Literal["predictions", "scores", "values", "probabilities", "loss"]


class Metric(ABC):
    """One value, or several, over a whole evaluation.

    An evaluation calls `reset`, then `update` with consecutive chunks in the loader's order, then
    `compute`. Every process sees every sample, so a metric never talks to other processes.
    """

    name: str
    """What error texts call the metric."""
    uses: Uses = "predictions"
    """What `update` is fed as predictions: classes, or values where there are none
    (`"predictions"`); what the model returns (`"scores"`, or `"values"` where logarithms of rates
    are refused); the probabilities of classes; or mean losses, and their weights as references
    (`"loss"`)."""
    keys: tuple[str, ...] | None = None
    """Names of the values, where they are known before the metric runs."""
    higher_is_better: bool | None = None
    """Whether the higher value is the better one, for all values; None where nobody can say."""
    latest_keys: tuple[str, ...] = ()
    """Names of the values that the latest evaluation got from it; set by the evaluation."""
    convention: Any = None
    """How the loss takes scores of the default step, if that is known; set by the evaluation."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was seen."""

    @abstractmethod
    def update(self, predictions: Any, references: Any) -> None:
        """Take in a chunk with one entry per sample in each argument.

        Where `uses` is `"loss"`: mean losses, and the number of items that each of them averages.

        Raises:
            DataError: The lengths differ, or an argument has no entry per sample.
        """

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the values over what was seen since `reset`; `{}` where that was nothing."""


def agreed(name: str, inputs: Iterable[T]) -> T:
    """Return what the parts of the metric `name` get; raise where they get different things."""
    counts = set(inputs)
    if len(counts) != 1:
        raise ConfigError(
            f"`{name}` must hold metrics of one kind of input, but has {sorted(counts, key=str)}. "
            "Pass those of each kind by themselves."
        )
    return counts.pop()


@contextmanager
def setting(objects: Iterable[Any], name: str, value: object) -> Iterator[None]:
    """Set an attribute of some objects inside, and what it was again after it."""
    before = [(each, getattr(each, name)) for each in objects]
    try:
        for each, _ in before:
            setattr(each, name, value)
        yield
    finally:
        for each, old in before:
            setattr(each, name, old)


def flatten(metric: str, result: Any) -> dict[str, float]:
    """Return `result` as numbers by name, nested names joined by `/`.

    Args:
        metric: Name of the metric, and of the value where `result` is a single number.
        result: A number, an array, or any nesting of mappings and sequences of them. Entries of
            arrays and sequences are named by their index.
    """
    values: dict[str, float] = {}
    for key, value in _entries("" if isinstance(result, Mapping) else metric, result):
        if isinstance(value, str) or not isinstance(value, int | float):
            raise DataError(
                f"The metric `{metric}` returned a {type(value).__name__} under `{key}`, but a "
                "value must be a number. Wrap the metric in a function that returns only numbers."
            )
        if key in values:
            raise DataError(
                f"The metric `{metric}` returned two values named `{key}`. Rename one of them."
            )
        values[key] = float(value)
    return values


def _entries(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and NumPy scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        yield key, value
        return
    for name, entry in pairs:
        yield from _entries(f"{key}/{name}" if key else str(name), entry)
