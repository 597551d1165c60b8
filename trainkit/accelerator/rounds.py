"""Which samples each process gets in each round of an epoch, by the rules of Accelerate.

A round is one batch on each process. With batches filled up, a short last round is completed by
samples from the start of the epoch; the number of real samples on each process stays known.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any, Protocol

__all__ = ["BatchRounds", "FlatRounds", "Rounds"]


class Rounds(Protocol):
    """The rounds of one epoch."""

    length: int
    """Rounds in which this process has a batch."""

    def tasks(self, first: int) -> Iterator[list[Any]]:
        """Yield this process's indices of each of its rounds from `first` on."""
        ...

    def counts(self, index: int) -> tuple[int, ...]:
        """Return how many samples of a round are real on each process; fill is at the end."""
        ...

    def size(self, index: int) -> int:
        """Return how many samples this process has in one of its rounds, with the fill."""
        ...


class FlatRounds:
    """A flat order of samples: round `k` is samples [k*W*b, (k+1)*W*b), process `r` its r-th slice.

    Args:
        order: The indices of the epoch.
        batch_size: Samples of one process in a round.
        rank: This process.
        size: Number of processes.
        even: Fill up the last round. On one process nothing is filled up.
        drop_last: Leave an incomplete last round out.
    """

    def __init__(
        self,
        order: Sequence[Any],
        *,
        batch_size: int,
        rank: int,
        size: int,
        even: bool,
        drop_last: bool,
    ) -> None:
        self._round = batch_size * size
        self._batch_size, self._rank, self._size = batch_size, rank, size
        rest = len(order) % (self._round if size > 1 else batch_size)
        self._real = len(order) - (rest if drop_last else 0)
        self._order = list(order[: self._real])
        rest = self._real % self._round
        if even and size > 1 and rest:
            start = self._order[: self._round]
            self._order += islice(cycle(start), self._round - rest)
        mine = len(self._order) - rank * batch_size
        self.length = max(0, -(-mine // self._round))

    def tasks(self, first: int) -> Iterator[list[Any]]:
        """Yield this process's indices of each of its rounds from `first` on."""
        for index in range(first, self.length):
            start = index * self._round + self._rank * self._batch_size
            yield self._order[start : start + self._batch_size]

    def counts(self, index: int) -> tuple[int, ...]:
        """Return how many samples of a round are real on each process."""
        left = self._real - index * self._round
        share = self._batch_size
        return tuple(min(max(left - rank * share, 0), share) for rank in range(self._size))

    def size(self, index: int) -> int:
        """Return how many samples this process has in one of its rounds."""
        start = index * self._round + self._rank * self._batch_size
        return min(self._batch_size, len(self._order) - start)


class BatchRounds:
    """Batches of any sizes: round `k` is batches [k*W, (k+1)*W).

    Args:
        batches: The batches of the epoch.
        rank: This process.
        size: Number of processes.
        even: Complete the last round by batches from the start, none of whose samples is real.
        drop_last: Leave an incomplete last round out.
        split: Each batch is a round, and each process takes a slice of it.
    """

    def __init__(
        self,
        batches: list[list[Any]],
        *,
        rank: int,
        size: int,
        even: bool,
        drop_last: bool,
        split: bool = False,
    ) -> None:
        self._rank, self._size = rank, size
        if split:
            self._batches = [piece for batch in batches for piece in _pieces(batch, size, even)]
            self._real = [len(piece) for batch in batches for piece in _pieces(batch, size, False)]
        else:
            rest = len(batches) % size
            self._batches = batches[: len(batches) - (rest if drop_last else 0)]
            self._real = [len(batch) for batch in self._batches]
            if even and rest and not drop_last:
                self._batches += islice(cycle(batches), size - rest)
        self._mine = [batch for batch in self._batches[rank::size] if batch]
        self.length = len(self._mine)

    def tasks(self, first: int) -> Iterator[list[Any]]:
        """Yield this process's indices of each of its rounds from `first` on."""
        yield from self._mine[first:]

    def counts(self, index: int) -> tuple[int, ...]:
        """Return how many samples of a round are real on each process."""
        found = self._real[index * self._size : (index + 1) * self._size]
        return (*found, *[0] * (self._size - len(found)))

    def size(self, index: int) -> int:
        """Return how many samples this process has in one of its rounds."""
        return len(self._mine[index])


def _pieces(batch: list[Any], size: int, even: bool) -> list[list[Any]]:
    """Return the slices of a batch; equally long, filled up from its start, where `even`."""
    share = -(-len(batch) // size)
    filled = list(islice(cycle(batch), share * size)) if even and batch else batch
    return [filled[rank * share : (rank + 1) * share] for rank in range(size)]
