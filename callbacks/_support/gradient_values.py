"""The gradients of a run in groups: their norms and histograms, over all shards."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from trainkit.basics.device import wide_dtype
from trainkit.basics.torch_internals import norm_of_each
from trainkit.strategies.sharded import ShardedStrategy
from trainkit.training.run import Run


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
        return [self.low + width * index for index in range(len(self.counts))] + [self.high]

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


CHUNK = 1 << 22  # values that are looked at at once, so that the copies stay small


class GradientValues:
    """The gradients as they are in `on_gradients`, by groups of parameters.

    Every process must make one and call its methods: sharded gradients are put together.

    Args:
        depth: Parts of a parameter's name that name its group; None: all.
    """

    def __init__(self, run: Run, depth: int | None) -> None:
        trained = [(n, p) for n, p in run.module.named_parameters() if p.requires_grad]
        keys = [name if depth is None else ".".join(name.split(".")[:depth]) for name, _ in trained]
        parameters = [p for _, p in trained]
        self._run = run
        self._names = list(dict.fromkeys(keys))
        numbers = {name: number for number, name in enumerate(self._names)}
        of_each = [run.strategy.local_gradients([p]) for p in parameters]
        there = [i for i, own in enumerate(of_each) if own]
        self._groups = [numbers[keys[i]] for i in there]
        # How many processes hold the same part: each counts it by its share.
        self._copies = [_copies(parameters[i], run) for i in there]
        self._gradients = [_dense(g) for own in of_each for g in own]
        self._present = sorted(set(self._groups))

    def norms(self) -> dict[str, Tensor]:
        """Return the L2 norm of each group, on the device."""
        device = self._run.strategy.device
        dtype = wide_dtype(device.type)
        squares = torch.zeros(len(self._names), dtype=dtype, device=device)
        parts = [i for i, gradient in enumerate(self._gradients) if gradient.numel()]
        if parts:
            present = [self._gradients[i] for i in parts]
            wide = any(gradient.dtype == torch.float64 for gradient in present)
            norms = norm_of_each(present, 2, None if wide else torch.float32)
            # In fp64 the square of a finite fp32 norm is finite too.
            shares = torch.tensor([self._copies[i] for i in parts], device=device).to(dtype)
            own = torch.stack([norm.to(device) for norm in norms]).to(dtype).square() / shares
            groups = torch.tensor([self._groups[i] for i in parts], device=device)
            squares.index_add_(0, groups, own)
        totals = self._over_shards(squares, "sum").sqrt()
        return {self._names[group]: totals[group] for group in self._present}

    def histograms(self, bins: int) -> dict[str, Histogram]:
        """Return a histogram of the finite values of each group that has any.

        It reads the device. Where all processes hold the same gradients, only the main process
        gets them.
        """
        if not (isinstance(self._run.strategy, ShardedStrategy) or self._run.is_main_process):
            return {}
        bounds = self._bounds()
        device = self._run.strategy.device
        counts = torch.zeros((len(self._names), bins), dtype=wide_dtype(device.type))
        for group, gradient, copies in zip(
            self._groups, self._gradients, self._copies, strict=True
        ):
            low, high = bounds[group]
            for chunk in _finite(gradient):
                positions = (chunk.to(wide_dtype(chunk.device.type)) - low) * (bins / (high - low))
                counted = torch.bincount(positions.long().clamp(0, bins - 1), minlength=bins)
                counts[group] += counted.cpu() / copies
        totals = self._over_shards(counts.to(device), "sum").tolist()
        return {
            self._names[group]: Histogram(*bounds[group], totals[group])
            for group in self._present
            if sum(totals[group])
        }

    def _bounds(self) -> list[tuple[float, float]]:
        """Return the least and the largest finite value of each group, the second above the first.

        A group without finite values has any.
        """
        extremes = [(-math.inf, -math.inf)] * len(self._names)  # of the negated values, of them
        for group, gradient in zip(self._groups, self._gradients, strict=True):
            for chunk in _finite(gradient):
                if chunk.numel():
                    low, high = (float(bound.item()) for bound in torch.aminmax(chunk))
                    negated, largest = extremes[group]
                    extremes[group] = (max(negated, -low), max(largest, high))
        device = self._run.strategy.device
        own = torch.tensor(extremes, dtype=wide_dtype(device.type), device=device)
        return [_apart(-low, high) for low, high in self._over_shards(own, "max").tolist()]

    def _over_shards(self, values: Tensor, op: Literal["sum", "max"]) -> Tensor:
        if isinstance(self._run.strategy, ShardedStrategy):
            return self._run.strategy.processes.all_reduce(values, op)
        return values


def _copies(parameter: Tensor, run: Run) -> int:
    """Return how many processes hold the same part of a parameter, where it is sharded."""
    parts = run.strategy.held_part_of(parameter)[2]
    return run.strategy.processes.size // parts if run.strategy.sharded else 1


def _dense(gradient: Tensor) -> Tensor:
    """Return the values of a gradient as real numbers; those that a sparse one leaves out are 0."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _finite(gradient: Tensor) -> Iterator[Tensor]:
    """Yield the finite values, piece by piece."""
    for chunk in torch.split(gradient.reshape(-1), CHUNK):
        yield chunk[torch.isfinite(chunk)]


def _apart(low: float, high: float) -> tuple[float, float]:
    """Return bounds that differ."""
    if low < high:
        return low, high
    value = low if math.isfinite(low) else 0.0
    margin = abs(value) * 1e-3 or 1e-12
    return value - margin, value + margin
