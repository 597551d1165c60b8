"""Histograms, from where they are made to where they are drawn."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from trainkit.training.run import Run

__all__ = ["Histogram", "HistogramLogger"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often values fall into bins of equal width.

    Args:
        low: Left edge of the first bin, the least value.
        high: Right edge of the last bin, the largest value; above `low`.
        counts: Values in each bin.
    """

    low: float
    high: float
    counts: list[float]

    @property
    def edges(self) -> list[float]:
        """The edges of the bins, one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + width * place for place in range(len(self.counts))] + [self.high]

    @property
    def centers(self) -> list[float]:
        """The middle of each bin."""
        return [(left + right) / 2 for left, right in pairwise(self.edges)]


@runtime_checkable
class HistogramLogger(Protocol):
    """A logger that draws histograms."""

    def add_histogram(self, run: Run, name: str, histogram: Histogram) -> None:
        """Write a histogram under `name`, at the present step; the main process calls it."""
        ...
