"""The order of an epoch, and how it is cut into the batches of the processes (rules 14-17)."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from trainkit import rng
from trainkit.errors import ConfigError, DataError

__all__ = [
    "BatchPlan",
    "FlatPlan",
    "KeyedOrder",
    "Plan",
    "announce_epoch",
    "divide",
    "refuse_shared",
]

Indices: TypeAlias = Tensor | list[Any]


def divide(batch_size: int, size: int) -> int:
    """Return the share of one of `size` processes in a global batch of `batch_size` samples."""
    share, rest = divmod(batch_size, size)
    if rest:
        raise ConfigError(
            f"`split_batches` divides the loader's batch size by the number of processes, but "
            f"{batch_size} is not a multiple of {size}. Use a multiple of {size}."
        )
    return share


def announce_epoch(objects: Sequence[Any], epoch: int) -> None:
    """Call `set_epoch(epoch)` on each of `objects` that has it, each once."""
    told: set[int] = set()
    for thing in objects:
        tell = getattr(thing, "set_epoch", None)
        if callable(tell) and id(thing) not in told:
            told.add(id(thing))
            tell(epoch)


def refuse_shared(samplers: Sequence[Any]) -> None:
    """Raise ConfigError where one of `samplers` shares the samples out already."""
    if any(isinstance(part, DistributedSampler) for part in samplers):
        raise ConfigError(
            "The loader has a `DistributedSampler`, but trainkit shares the samples out by "
            "itself. Remove it, and use `shuffle=True` if it shuffled."
        )


class KeyedOrder:
    """Runs a loader's own sampler under the key of an epoch.

    Args:
        loader: A map-style loader.
        seed: The seed of the run, or of evaluation.

    Raises:
        ConfigError: A `DistributedSampler` is in use.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        batch_sampler = loader.batch_sampler
        inner = getattr(batch_sampler, "sampler", None)
        self.samplers = [
            part for part in (loader.sampler, batch_sampler, inner) if part is not None
        ]
        refuse_shared(self.samplers)
        self.seed = seed
        self.yields_batches = batch_sampler is not None and type(batch_sampler) is not BatchSampler
        self.sampler: Any = loader.sampler
        if batch_sampler is not None:
            self.sampler = batch_sampler if self.yields_batches else inner
        # The initial seeds as the user left them: a pass changes them for its time.
        self._generators: list[tuple[torch.Generator, int]] = []
        for part in self.samplers:
            own = getattr(part, "generator", None)
            known = any(own is generator for generator, _ in self._generators)
            if isinstance(own, torch.Generator) and not known:
                self._generators.append((own, own.initial_seed()))

    @property
    def seeds(self) -> list[int]:
        """The initial seeds of the samplers' own generators."""
        return [initial for _, initial in self._generators]

    def run(self, epoch: int) -> Indices:
        """Return all that the sampler yields in `epoch`; no generator is left changed."""
        key = rng.order_seed(self.seed, epoch)
        host = rng.save_host()
        states = [generator.get_state() for generator, _ in self._generators]
        try:
            rng.seed_host(key)
            for generator, initial in self._generators:
                generator.manual_seed(rng.derive(key, initial))
            drawn = _drawn_at_once(self.sampler)
            return list(self.sampler) if drawn is None else drawn
        finally:
            for (generator, _), state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            rng.restore_host(host)


def _drawn_at_once(sampler: Any) -> Tensor | None:
    """Return what a sampler of torch's own would yield one by one; None for any other.

    It is the same order, from the same draws. A million of Python's numbers take half a second.
    """
    if type(sampler) is SequentialSampler:
        return torch.arange(len(sampler))
    if type(sampler) is not RandomSampler or sampler.replacement:
        return None
    length = len(sampler.data_source)
    if sampler.num_samples != length:
        return None
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return torch.randperm(length, generator=generator)


class FlatPlan:
    """A flat order, cut into equal slices: round `k` is samples [k*W*b, (k+1)*W*b).

    In the `zero_rounds` this process has nothing.

    Args:
        order: The indices of the epoch.
        batch_size: Samples of one process in a round.
        rank: This process.
        size: Number of processes.
        unit: The epoch is cut to a multiple of this many samples; 1 to keep all.
    """

    def __init__(
        self, order: Indices, *, batch_size: int, rank: int, size: int, unit: int = 1
    ) -> None:
        self.samples = len(order) - len(order) % unit
        self._order = _as_tensor(order[: self.samples])
        self._share = batch_size
        self._round = batch_size * size
        self._offset = batch_size * rank
        self._size = size
        self._full = self.samples // self._round
        self._full_shares = (batch_size,) * size, self._round
        self.rounds = -(-self.samples // self._round)
        lacks = bool(self.rounds) and self._start(self.rounds - 1) >= self.samples
        self.zero_rounds = frozenset([self.rounds - 1] if lacks else [])

    def tasks(self, first: int, stop: int) -> Iterator[Indices | None]:
        """Yield this process's indices of the rounds `first` to `stop`; None where it has none."""
        for start in range(self._start(first), self._start(stop), self._round):
            yield self._order[start : start + self._share] if start < self.samples else None

    def shares(self, index: int) -> tuple[tuple[int, ...], int]:
        """Return the samples of each process in round `index`, and their sum."""
        if index < self._full:
            return self._full_shares
        left = self.samples - index * self._round
        share = self._share
        counts = tuple(min(max(left - rank * share, 0), share) for rank in range(self._size))
        return counts, left

    def total(self, first: int, stop: int) -> int:
        """Return the samples of the rounds `first` to `stop` over all processes."""
        end = stop * self._round if stop <= self._full else self.samples
        return end - first * self._round

    def round_at(self, position: int) -> int:
        """Return the round that starts after `position` samples; DataError if none does."""
        if position == self.samples:
            return self.rounds
        index, rest = divmod(position, self._round)
        if rest or not 0 <= position < self.samples:
            raise _off_boundary(position, self.samples, f"a multiple of {self._round}")
        return index

    def digest(self, accumulation: int) -> str | None:
        """Return what tells this order from others; rounds of any size have the same."""
        from trainkit.data.order_facts import digest_of  # only checkpoints need it

        return digest_of(self._order)

    def spare(self) -> Indices:
        """Return the indices that stand in for a process that has had none."""
        return self._order[: self._share]

    def _start(self, index: int) -> int:
        return index * self._round + self._offset


class BatchPlan:
    """The batches of a custom batch sampler: round `k` is batches [k*W, (k+1)*W).

    Args:
        batches: The batches of the epoch, without empty ones.
        rank: This process.
        size: Number of processes.
        split: Each batch is a round and is cut into `size` slices instead.
    """

    def __init__(self, batches: list[list[Any]], *, rank: int, size: int, split: bool) -> None:
        slices = [piece for batch in batches for piece in _slices(batch, size)]
        self._slices = slices if split else batches
        self._rank = rank
        self._size = size
        self.rounds = -(-len(self._slices) // size)
        totals = [self.shares(index)[1] for index in range(self.rounds)]
        self._starts = [0, *accumulate(totals)]
        self.samples = self._starts[-1]
        lacking = (index for index in range(self.rounds) if not self.shares(index)[0][rank])
        self.zero_rounds = frozenset(lacking)

    def tasks(self, first: int, stop: int) -> Iterator[Indices | None]:
        """Yield this process's indices of the rounds `first` to `stop`; None where it has none."""
        for index in range(first, stop):
            yield None if index in self.zero_rounds else self._of(index, self._rank)

    def shares(self, index: int) -> tuple[tuple[int, ...], int]:
        """Return the samples of each process in round `index`, and their sum."""
        counts = tuple(len(self._of(index, rank)) for rank in range(self._size))
        return counts, sum(counts)

    def total(self, first: int, stop: int) -> int:
        """Return the samples of the rounds `first` to `stop` over all processes."""
        return self._starts[stop] - self._starts[first]

    def round_at(self, position: int) -> int:
        """Return the round that starts after `position` samples; DataError if none does."""
        index = bisect_left(self._starts, position)
        if index > self.rounds or self._starts[index] != position:
            raise _off_boundary(position, self.samples, "where a global batch starts")
        return index

    def digest(self, accumulation: int) -> str | None:
        """Return what tells this order, and where its windows begin, from others."""
        from trainkit.data.order_facts import digest_of  # only checkpoints need it

        samples = digest_of([index for batch in self._slices for index in batch])
        windows = digest_of([*self._starts[:-1:accumulation], self.samples])
        return samples and f"{samples} {windows}"

    def spare(self) -> Indices:
        """Return the indices that stand in for a process that has had none."""
        return self._slices[0]

    def _of(self, index: int, rank: int) -> list[Any]:
        place = index * self._size + rank
        return self._slices[place] if place < len(self._slices) else []


Plan: TypeAlias = FlatPlan | BatchPlan


def _slices(batch: list[Any], size: int) -> list[list[Any]]:
    share = -(-len(batch) // size)
    return [batch[rank * share : (rank + 1) * share] for rank in range(size)]


def _as_tensor(order: Indices) -> Indices:
    # One tensor is sliced without Python lists and takes an eighth of the memory.
    if isinstance(order, Tensor):
        return order
    if set(map(type, order)) != {int}:
        return order
    try:
        return torch.tensor(order, dtype=torch.int64)
    except (OverflowError, RuntimeError):  # beyond 64 bits
        return order


def _off_boundary(position: int, samples: int, place: str) -> DataError:
    return DataError(
        f"The position is {position} of the epoch's {samples} samples, but must be {place}. Keep "
        "the global batch (batch size times processes) and the data set of the checkpoint."
    )
