"""Map-style data of a loop of the user's own: the sampler's order, cut into rounds."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from trainkit import rng
from trainkit.data.fetch import fetch_for
from trainkit.data.loader import Preparation
from trainkit.data.order import announce_epoch, divide
from trainkit.data.order_facts import digest_of
from trainkit.data.transfer import transfer_for
from trainkit.data.workers import datasets_of, source_for
from trainkit.errors import CheckpointError, ConfigError
from trainkit.own_loop.loader import Batch, Resumption, SharedLoader, Sharing
from trainkit.own_loop.rounds import BatchRounds, FlatRounds, Rounds

__all__ = ["MappedShare"]


class MappedShare(SharedLoader):
    """A loader over a map-style data set.

    On one process samplers draw what they draw under torch's own loader. On several the order is
    that of process 0. What is random inside the data set is drawn from streams that are keyed by
    epoch and sample, so it differs between samples and not between runs (DESIGN 2.13).

    Args:
        source: The user's loader.
        sharing: How it is shared out.
    """

    def __init__(self, source: DataLoader[Any], sharing: Sharing) -> None:
        super().__init__(source, sharing)
        processes = sharing.processes
        self._rank, self._size = processes.rank, processes.size
        batch_sampler: Any = source.batch_sampler
        inner = getattr(batch_sampler, "sampler", None)
        self._samplers = [part for part in (inner, batch_sampler) if part is not None]
        if any(isinstance(part, DistributedSampler) for part in self._samplers):
            raise ConfigError(
                "The loader has a `DistributedSampler`, but `prepare` shares the samples out by "
                "itself. Remove it, and use `shuffle=True` if it shuffled."
            )
        self._is_flat = type(batch_sampler) is BatchSampler
        self._sampler: Any = inner if self._is_flat else batch_sampler
        self._batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self._drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if sharing.configuration.split_batches and self._batch_size is not None:
            self._batch_size = divide(self._batch_size, self._size)
        self._seed = int(processes.broadcast_object(torch.initial_seed()))
        self._seedable = self._seedable_sampler()
        self._give_generator()
        key = rng.derive(self._seed, "own loop")
        fetch = fetch_for(source, key, sample_seeding=True)
        preparation = Preparation(processes=processes, device=sharing.device, seed=key, trains=True)
        self._source = source_for(fetch, source, preparation)
        self._transfer = transfer_for(sharing.device)
        self._inside = 0  # batches of a pass before which its sampler is not read to the end
        self._lengths: dict[tuple[int, bool], int] = {}
        self._drawn: list[Any] = []  # by the pass under way

    @override
    def order_facts(self) -> dict[str, Any]:
        own = {"samples of a round": self._batch_size and self._batch_size * self._size}
        return super().order_facts() | own

    @override
    def _order_digest(self) -> str | None:
        return digest_of(self._drawn)

    @override
    def __len__(self) -> int:
        count = len(self._sampler)
        key = (count, self.even_batches)
        if key not in self._lengths:
            order = range(count) if self._is_flat else [[0] * self._size] * count
            self._lengths[key] = self._rounds(order).length
        return self._lengths[key]

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._announce()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generators": self._generator_states()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_generators(state_dict["generators"])

    @override
    def close(self) -> None:
        self._source.close()

    @override
    def _batches(self, skip: int, resumption: Resumption | None) -> Iterator[Batch]:
        self._announce()
        self._drawn = self._run_sampler(resumption)
        rounds = self._rounds(self._drawn)
        fetched = self._source.batches(self.epoch, partial(rounds.tasks, skip))
        last = rounds.length - 1
        # Accelerate reads one batch ahead, and a short one reads the sampler to its end.
        whole = last >= 0 and sum(rounds.counts(last)) == rounds.size(0) * self._size
        self._inside = last if whole else last - 1
        for index, data in enumerate(self._transfer.ahead(fetched), skip):
            counts, size = rounds.counts(index), rounds.size(index)
            has = tuple(self.even_batches or count > 0 for count in counts)
            yield Batch(data, counts, size, has, last - index, index == last)

    @override
    def _leave(self) -> None:
        if self._order is not None and 0 < self._position <= self._inside:
            # A sampler that is not read to its end has not drawn what it draws there.
            self._set_generators(self._order["generators_inside"])
        super()._leave()

    def _announce(self) -> None:
        announce_epoch([*self._samplers, *datasets_of(self.source.dataset)], self.epoch)

    def _rounds(self, order: Any) -> Rounds:
        """Cut what the sampler yields, samples or batches, into rounds."""
        options: dict[str, Any] = {
            "rank": self._rank,
            "size": self._size,
            "even": self.even_batches,
            "drop_last": self._drop_last,
        }
        if self._is_flat:
            return FlatRounds(order, batch_size=self._batch_size, **options)
        batches = [list(batch) for batch in order]
        split = self._sharing.configuration.split_batches and self._size > 1
        full = getattr(self._sampler, "batch_size", None)
        if type(full) is int and not split and _is_regular(batches, full):
            order = [index for batch in batches for index in batch]
            return FlatRounds(order, batch_size=full, **options)
        return BatchRounds(batches, split=split, **options)

    def _run_sampler(self, resumption: Resumption | None) -> list[Any]:
        """Return all that the sampler yields in this pass; notes what the order is made from."""
        if resumption is None or resumption.order is None:
            self._synchronize()
            self._order = self._order_state()
            return self._draw()
        self._order = resumption.order
        host = rng.save_host()
        python, numpy, cpu = self._order["host"]
        after = self._order["generators_after"]
        rng.restore_host((python, numpy, cpu))
        self._set_generators(self._order["generators"])
        order = self._draw()
        self._set_generators(after)
        rng.restore_host(host)
        if resumption.digest not in (None, digest_of(order)):
            raise CheckpointError(
                "The sampler gives another order than in the pass that the state was saved in: "
                "its weights, its seed or its data changed, or it keeps a random state of its own. "
                "Samples would come twice or never. Use the same sampler, keyed by `set_epoch` or "
                "drawing from its `.generator`, or a state that was saved between two passes."
            )
        return order

    def _draw(self) -> list[Any]:
        # What torch's own loader draws for its workers: what comes after it stays the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.source.generator)
        if self._seedable is not None:
            assert isinstance(self._seedable.generator, torch.Generator)
            self._seedable.generator.manual_seed(self._seed_of_order() + self.epoch)
            return list(self._seedable)
        own = any(
            isinstance(getattr(s, "generator", None), torch.Generator) for s in self._samplers
        )
        if self._size == 1 or own or type(self._sampler) is SequentialSampler:
            reading = iter(self._sampler)
            order = list(islice(reading, 1))
            self._order["generators_inside"] = self._generator_states()
            order += reading
        else:  # it may draw from global generators, which differ between processes
            with rng.preserved():
                rng.seed_host(rng.order_seed(self._seed, self.epoch))
                order = list(self._sampler)
        self._order["generators_after"] = self._generator_states()
        return order

    def _order_state(self) -> dict[str, Any]:
        states = self._generator_states()
        return {
            "host": rng.save_host(),
            "generators": states,
            "generators_inside": states,
            "generators_after": states,
        }

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """Return the samplers' and the loader's own generators."""
        parts = [*self._samplers, self.source]
        found = [getattr(part, "generator", None) for part in parts]
        unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
        return list(unique.values())

    def _set_generators(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)

    def _synchronize(self) -> None:
        """Take the states of the generators of process 0."""
        if self._size == 1:
            return
        broadcast, wanted = self._sharing.processes.broadcast, self._sharing.rng_types
        if "generator" in wanted:
            for generator in self._generators():
                generator.set_state(broadcast(generator.get_state()))
        if "torch" in wanted:
            torch.set_rng_state(broadcast(torch.get_rng_state()))
        if "cuda" in wanted and self._sharing.device.type == "cuda":
            torch.cuda.set_rng_state(broadcast(torch.cuda.get_rng_state()))

    def _give_generator(self) -> None:
        """Give a shuffling sampler a generator that can be made equal on all processes."""
        sampler = self._sampler
        is_random = isinstance(sampler, RandomSampler) and self._seedable is None
        if self._size > 1 and is_random and sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))

    def _seedable_sampler(self) -> RandomSampler | None:
        wanted = self._sharing.configuration.use_seedable_sampler
        if not wanted or not self._is_flat or type(self._sampler) is not RandomSampler:
            return None
        return RandomSampler(
            self._sampler.data_source,
            replacement=self._sampler.replacement,
            num_samples=self._sampler._num_samples,
            generator=torch.Generator(),
        )

    def _seed_of_order(self) -> int:
        given = self._sharing.configuration.data_seed
        return self._seed if given is None else given


def _is_regular(batches: list[list[Any]], size: int) -> bool:
    """Return whether all batches have `size` samples, the last one perhaps fewer."""
    full = all(len(batch) == size for batch in batches[:-1])
    return bool(batches) and full and len(batches[-1]) <= size
