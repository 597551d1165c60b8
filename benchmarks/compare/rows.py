"""What was measured, and what is made of it."""

from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

__all__ = ["Row", "difference", "ratios"]


@dataclass(kw_only=True)
class Row:
    """One peer at one workload."""

    workload: str
    peer: str
    seconds: list[float] = field(default_factory=list)
    """Of a unit, one for each round."""
    ratios: list[float] = field(default_factory=list)
    """To the loop by hand in the same round."""
    calls: float | None = None
    syncs: float | None = None
    modules: int | None = None
    difference: float | None = None
    """From the product of the loop by hand; None where there was nothing to compare."""
    bound: float = 0.0
    missing: str = ""
    """Why there are no figures, where that is nobody's fault."""
    failure: str = ""
    """Why there are no figures, where there should be some."""

    @property
    def is_measured(self) -> bool:
        """Whether there are figures."""
        return not self.missing and not self.failure

    @property
    def is_wrong(self) -> bool:
        """Whether it failed, or its product is not that of the loop by hand."""
        beyond = self.difference is not None and not self.difference <= self.bound
        return bool(self.failure) or beyond

    @property
    def time(self) -> float:
        """Median seconds of a unit."""
        return median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return median(self.ratios)


def ratios(seconds: list[float], raw: list[float]) -> list[float]:
    """Return the ratio of each round: a slow moment of the machine hits both alike."""
    return [mine / theirs for mine, theirs in zip(seconds, raw, strict=True)]


def difference(product: Tensor, raw: Tensor) -> float:
    """Return the largest difference of two elements as a share of the largest element."""
    if product.shape != raw.shape:
        return float("inf")
    if torch.equal(product, raw):
        return 0.0
    return float((product - raw).abs().max() / raw.abs().max())
