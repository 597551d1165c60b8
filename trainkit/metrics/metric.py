"""The face that every metric shows to the evaluation."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

__all__ = ["Metric"]


class Metric(ABC):
    """One figure, or several, over a whole evaluation.

    An evaluation calls `reset`, then `update` with consecutive chunks in the loader's order, then
    `compute`. Every process sees every sample, so a metric never talks to other processes.
    """

    name: str
    """What error texts call the metric."""

    uses: ClassVar[Literal["predictions", "loss"]] = "predictions"
    """What `update` is fed: predictions and references, or mean losses and their weights."""

    keys: tuple[str, ...] | None = None
    """Names of the figures, where they are known before the metric runs."""

    higher_is_better: bool | None = None
    """Whether the higher figure is the better one, for all figures; None where nobody can say."""

    figures: tuple[str, ...] = ()
    """Names of the figures that the latest evaluation got from it; set by the evaluation."""

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
