"""How the order of an epoch is cut into global batches, and these into those of the processes.

A global batch is one batch on each process. Where the last one is short, the last processes lack
samples, unless a plan with `fill` completes it by samples from the start of the epoch; the number
of real samples on each process stays known (rules 14-17).
"""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trainkit.data.order import Indices, whole_numbers
from trainkit.errors import DataError


class FlatPlan:
    """A flat order, cut into equal slices: global batch `k` is samples [k*W*b, (k+1)*W*b).

    In the global batches of `lacking` this process has nothing.

    Args:
        batch_size: Samples of one process in a global batch.
        fill: Complete the last global batch. On one process nothing is filled up.
    """

    def __init__(
        self, order: Indices, *, batch_size: int, rank: int, size: int, fill: bool = False
    ) -> None:
        self.samples = len(order)
        numbers = None if isinstance(order, Tensor) else whole_numbers(order)
        self._order = order if numbers is None else numbers
        self._share = batch_size
        self._global_size = batch_size * size
        self._offset = batch_size * rank
        self._size = size
        self._full = self.samples // self._global_size
        self._full_shares = (batch_size,) * size, self._global_size
        self.length = -(-self.samples // self._global_size)
        if fill and size > 1:
            full = self.length * self._global_size
            self._order = _filled(self._order, full, min(self.samples, self._global_size))
        lacks = bool(self.length) and self._start(self.length - 1) >= len(self._order)
        self.lacking = frozenset([self.length - 1] if lacks else [])

    def tasks(self, first: int, stop: int) -> Iterator[Indices | None]:
        """Yield this process's indices of global batches `first` to `stop`; None where it lacks."""
        length = len(self._order)
        for start in range(self._start(first), self._start(stop), self._global_size):
            yield self._order[start : start + self._share] if start < length else None

    def shares(self, index: int) -> tuple[tuple[int, ...], int]:
        """Return the real samples of each process in a global batch, and their sum."""
        if index < self._full:
            return self._full_shares
        left = self.samples - index * self._global_size
        share = self._share
        counts = tuple(min(max(left - rank * share, 0), share) for rank in range(self._size))
        return counts, left

    def local_size(self, index: int) -> int:
        """Return how many samples this process has in a global batch, with the fill."""
        return min(self._share, len(self._order) - self._start(index))

    def total(self, first: int, stop: int) -> int:
        """Return the real samples of global batches `first` to `stop` over all processes."""
        end = stop * self._global_size if stop <= self._full else self.samples
        return end - first * self._global_size

    def index_at(self, position: int) -> int:
        """Return the global batch that starts after `position` samples; DataError if none does."""
        if position == self.samples:
            return self.length
        index, rest = divmod(position, self._global_size)
        if rest or not 0 <= position < self.samples:
            raise _off_boundary(position, self.samples, f"a multiple of {self._global_size}")
        return index

    def digest(self, accumulation: int) -> str | None:
        """Return what tells this order from others; global batches of any size have the same."""
        from trainkit.data.order_facts import digest_of  # only checkpoints need it

        return digest_of(self._order)

    def fallback_batch(self) -> Indices:
        """Return the indices that stand in for a process that has had none."""
        return self._order[: self._share]

    def _start(self, index: int) -> int:
        return index * self._global_size + self._offset


class BatchPlan:
    """The batches of a custom batch sampler: global batch `k` is batches [k*W, (k+1)*W).

    Args:
        batches: The batches of the epoch; empty ones are left out.
        split: Each batch is a global batch and is cut into `size` slices instead.
        fill: Complete the last global batch by whole batches, none of whose samples is real; with
            `split`, make the slices of each batch equally long by samples from its start.
    """

    def __init__(
        self, batches: list[list[Any]], *, rank: int, size: int, split: bool, fill: bool = False
    ) -> None:
        given = [batch for batch in batches if batch]
        real = [part for batch in given for part in _slices(batch, size)] if split else given
        self._counts = [len(batch) for batch in real]
        self._batches = real
        if fill and split:
            whole = (_filled(batch, -(-len(batch) // size) * size, len(batch)) for batch in given)
            self._batches = [part for batch in whole for part in _slices(batch, size)]
        elif fill:
            self._batches = _filled(real, -(-len(real) // size) * size, len(real))
        self._rank = rank
        self._size = size
        self.length = -(-len(real) // size)
        totals = [self.shares(index)[1] for index in range(self.length)]
        self._starts = [0, *accumulate(totals)]
        self.samples = self._starts[-1]
        self.lacking = frozenset(i for i in range(self.length) if not self.local_size(i))

    def tasks(self, first: int, stop: int) -> Iterator[Indices | None]:
        for index in range(first, stop):
            yield self._own(index) or None

    def shares(self, index: int) -> tuple[tuple[int, ...], int]:
        counts = self._counts[index * self._size : (index + 1) * self._size]
        return (*counts, *[0] * (self._size - len(counts))), sum(counts)

    def local_size(self, index: int) -> int:
        return len(self._own(index))

    def total(self, first: int, stop: int) -> int:
        return self._starts[stop] - self._starts[first]

    def index_at(self, position: int) -> int:
        index = bisect_left(self._starts, position)
        if index > self.length or self._starts[index] != position:
            raise _off_boundary(position, self.samples, "where a global batch starts")
        return index

    def digest(self, accumulation: int) -> str | None:
        """Return what tells this order, and where its windows begin, from others."""
        from trainkit.data.order_facts import digest_of  # only checkpoints need it

        samples = digest_of([index for batch in self._batches for index in batch])
        windows = digest_of([*self._starts[:-1:accumulation], self.samples])
        return samples and f"{samples} {windows}"

    def fallback_batch(self) -> Indices:
        return self._batches[0]

    def _own(self, index: int) -> list[Any]:
        number = index * self._size + self._rank
        return self._batches[number] if number < len(self._batches) else []


Plan: TypeAlias = FlatPlan | BatchPlan


def _slices(batch: list[Any], size: int) -> list[list[Any]]:
    share = -(-len(batch) // size)
    return [batch[rank * share : (rank + 1) * share] for rank in range(size)]


def _filled(order: Any, length: int, period: int) -> Any:
    """Return `order` with its first `period` entries again and again, up to `length` entries."""
    again = [index % period for index in range(length - len(order))]
    if isinstance(order, Tensor):
        return torch.cat([order, order[again]]) if again else order
    return [*order, *(order[index] for index in again)]


def _off_boundary(position: int, samples: int, limit: str) -> DataError:
    return DataError(
        f"The position is {position} of the epoch's {samples} samples, but must be {limit}. Keep "
        "the global batch (batch size times processes) and the data set of the checkpoint."
    )
