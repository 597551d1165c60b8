"""The order of an epoch: what the sampler yields under its key (rules 14-17)."""

from collections.abc import Sequence
from itertools import islice
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

from trainkit.basics import rng
from trainkit.errors import ConfigError

Indices: TypeAlias = Tensor | list[Any]


def length_of(obj: Any) -> int | None:
    """Return `len(thing)`; None where it has no length."""
    try:
        return len(obj)
    except (TypeError, NotImplementedError):
        return None


def divide(batch_size: int, size: int) -> int:
    """Return the share of one of `size` processes in a global batch of `batch_size` samples."""
    share, rest = divmod(batch_size, size)
    if rest:
        raise ConfigError(
            f"`split_batches` divides the loader's batch size by the number of processes, but "
            f"{batch_size} is not a multiple of {size}. Use a multiple of {size}."
        )
    return share


def set_epoch_on(objects: Sequence[Any], epoch: int) -> None:
    """Call `set_epoch(epoch)` on each of `objects` that has it, each once."""
    for each in dict(zip(map(id, objects), objects, strict=True)).values():
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


def is_of_torchdata(obj: Any) -> bool:
    """Return whether a loader or batch sampler is one of torchdata, which yields as torch's do."""
    own = getattr(type(obj), "__iter__", None)
    return getattr(own, "__module__", "").startswith("torchdata.stateful_dataloader.")


def is_plain(batch_sampler: Any) -> bool:
    """Return whether batches are so many indices of the sampler in a row."""
    return type(batch_sampler) is BatchSampler or is_of_torchdata(batch_sampler)


def whole_numbers(order: Sequence[Any]) -> Tensor | None:
    """Return an order as one tensor, which takes an eighth of a list; None of other things."""
    if set(map(type, order)) != {int}:
        return None
    try:
        return torch.tensor(order, dtype=torch.int64)
    except (OverflowError, RuntimeError, ValueError):  # beyond 64 bits
        return None


class KeyedOrder:
    """Runs a loader's own sampler under the key of an epoch.

    Args:
        loader: A map-style loader.
        seed: The seed of the run, or of evaluation.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        batch_sampler = loader.batch_sampler
        inner = getattr(batch_sampler, "sampler", None)
        self.samplers = [
            part for part in (loader.sampler, batch_sampler, inner) if part is not None
        ]
        if any(isinstance(part, DistributedSampler) for part in self.samplers):
            raise ConfigError(
                "The loader has a `DistributedSampler`, but trainkit shares the samples out by "
                "itself. Remove it, and use `shuffle=True` if it shuffled."
            )
        self.seed, self._data = seed, loader.dataset
        self.yields_batches = batch_sampler is not None and not is_plain(batch_sampler)
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
            return whole_order(self.sampler, self._data) if drawn is None else drawn
        finally:
            for (generator, _), state in zip(self._generators, states, strict=True):
                generator.set_state(state)
            rng.restore_host(host)


def whole_order(sampler: Any, dataset: Any) -> list[Any]:
    """Return all that a sampler yields; one without an end, which takes all memory, is refused."""
    most = 100_000 + 10 * max(length_of(sampler) or 0, length_of(dataset) or 0)
    order = list(islice(sampler, most))
    if len(order) == most:
        raise ConfigError(
            f"The sampler, a `{type(sampler).__name__}`, has yielded {most} entries and seems "
            "to have no end. Let it yield one pass: with `max_steps` epochs follow each other. If "
            "its passes are as long, give it a `__len__`."
        )
    return order


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
