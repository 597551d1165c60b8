"""The face that every metric shows to the evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from trainkit.errors import ConfigError

__all__ = ["Metric", "Uses", "agreed"]

T = TypeVar("T")

Uses: TypeAlias = Literal["predictions", "scores", "values", "probabilities", "loss"]


class Metric(ABC):
    """One figure, or several, over a whole evaluation.

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
    """Names of the figures, where they are known before the metric runs."""

    higher_is_better: bool | None = None
    """Whether the higher figure is the better one, for all figures; None where nobody can say."""

    figures: tuple[str, ...] = ()
    """Names of the figures that the latest evaluation got from it; set by the evaluation."""

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
        """Return the figures over what was seen since `reset`; `{}` where that was nothing."""


def agreed(name: str, inputs: Iterable[T]) -> T:
    """Return what the parts of the metric `name` get; raise where they get different things."""
    found = set(inputs)
    if len(found) != 1:
        raise ConfigError(
            f"`{name}` must hold metrics of one kind of input, but has {sorted(found, key=str)}. "
            "Pass those of each kind by themselves."
        )
    return found.pop()
