"""Map-style data of a loop of the user's own: the sampler's order, cut into rounds."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
)
from typing_extensions import override

from trainkit import rng
from trainkit.accelerator.loader import Batch, Resumption, SharedLoader, Sharing
from trainkit.accelerator.rounds import BatchRounds, FlatRounds, Rounds
from trainkit.data.fetch import fetch_for
from trainkit.data.loader_context import LoaderContext
from trainkit.data.order import announce_epoch, divide, refuse_shared
from trainkit.data.order_facts import OWN, digest_of, run_to
from trainkit.data.transfer import transfer_for
from trainkit.data.workers import datasets_of, source_for
from trainkit.errors import CheckpointError

__all__ = ["MappedShare"]


class MappedShare(SharedLoader):
    """A loader over a map-style data set.

    On one process samplers draw what they draw under torch's own loader. On several the order is
    that of process 0. What is random inside the data set is drawn from streams that are keyed by
    epoch and sample, so it differs between samples and not between runs (rule 13).

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
        refuse_shared(self._samplers)
        self._is_flat = type(batch_sampler) is BatchSampler
        self._sampler: Any = inner if self._is_flat else batch_sampler
        self._batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self._drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if sharing.configuration.split_batches and self._batch_size is not None:
            self._batch_size = divide(self._batch_size, self._size)
        self._seed = int(processes.broadcast_object(torch.initial_seed()))
        self._seedable: RandomSampler | None = None
        wanted = sharing.configuration.use_seedable_sampler and self._is_flat
        if wanted and type(self._sampler) is RandomSampler:
            self._seedable = _seedable(self._sampler)
        elif self._size > 1 and isinstance(self._sampler, RandomSampler):
            _give_generator(self._sampler)
        key = rng.derive(self._seed, "own loop")
        fetch = fetch_for(source, key, sample_seeding=True)
        context = LoaderContext(processes=processes, device=sharing.device, seed=key, trains=True)
        self._source = source_for(fetch, source, context)
        self._transfer = transfer_for(sharing.device)
        self._inside = 0  # batches of a pass before which its sampler is not read to the end
        self._lengths: dict[tuple[int, bool], int] = {}
        # Between passes, such a sampler cannot be told to begin where it was.
        self._may_keep_state = any(
            not type(part).__module__.startswith("torch.") for part in self._samplers
        )
        self._drawn: list[Any] = []  # by the latest pass
        self._digest: str | None = None  # of that, once it was asked for

    @override
    def order_facts(self) -> dict[str, Any]:
        own = {"samples of a round": self._batch_size and self._batch_size * self._size}
        return super().order_facts() | own

    @override
    def _order_digest(self) -> str | None:
        if self._order is None:
            return None
        if self._digest is None:
            self._digest = digest_of(self._drawn)
        return self._digest

    @override
    def come_to(self, state_dict: dict[str, Any], objects: Sequence[Any]) -> str:
        digest, order = state_dict.get("digest"), state_dict["order"] or {}
        registered = any(one is part for one in objects for part in self._samplers)
        if digest is None or "runs" not in order or registered or not self._may_keep_state:
            return ""
        latest = self._order or {}
        if latest.get("runs") == order["runs"] and self._order_digest() == digest:
            return ""
        why = ""
        with suppress(Exception):  # one that is not ready raises again later
            why = run_to(digest, order["runs"], partial(self._draw_again, order))
        return why if why == OWN else ""  # another order is allowed between two passes

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
        self._run_sampler(resumption)
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
        order = self._order
        if order is not None and 0 < self._position <= self._inside:
            # A sampler that is not read to its end has not drawn what it draws there.
            self._set_generators(order["generators_inside"])
        super()._leave()
        if self._may_keep_state:
            self._order = order

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

    def _run_sampler(self, resumption: Resumption | None) -> None:
        """Draw all that the sampler yields in this pass; notes what the order is made from."""
        if resumption is None or resumption.order is None:
            self._synchronize()
            self._order = self._order_state()
            self._drawn, self._digest = self._draw(), None
            return
        order, digest = resumption.order, resumption.digest
        after = order["generators_after"]
        draw = partial(self._draw_again, order)
        if digest is None:  # of an older state, or of what is not made of plain values
            draw()
        elif why := run_to(digest, order.get("runs", 1), draw):
            raise CheckpointError(
                f"The pass that the state was saved in cannot go on: {why}. Samples would come "
                "twice or never. Use the same sampler, or a state that was saved between two "
                "passes."
            )
        self._set_generators(after)

    def _draw_again(self, order: dict[str, Any]) -> str | None:
        """Run the sampler on the random streams of an earlier pass; return the order's digest."""
        host, states, epoch = rng.save_host(), self._generator_states(), self.epoch
        python, numpy, cpu = order["host"]
        try:
            self.epoch, self._order = order.get("epoch", epoch), order
            self._announce()
            rng.restore_host((python, numpy, cpu))
            self._set_generators(order["generators"])
            self._drawn, self._digest = self._draw(), None
            return self._order_digest()
        finally:
            self._set_generators(states)
            rng.restore_host(host)
            self.epoch = epoch

    def _draw(self) -> list[Any]:
        # What torch's own loader draws for its workers: what comes after it stays the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.source.generator)
        if self._seedable is not None:
            assert isinstance(self._seedable.generator, torch.Generator)
            given = self._sharing.configuration.data_seed
            seed = self._seed if given is None else given
            self._seedable.generator.manual_seed(seed + self.epoch)
            return list(self._seedable)
        own = bool(_generators_of(self._samplers))
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
            "epoch": self.epoch,
            "runs": (self._order or {}).get("runs", 0) + 1,
        }

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """Return the samplers' and the loader's own generators."""
        return _generators_of([*self._samplers, self.source])

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


def _generators_of(parts: Sequence[Any]) -> list[torch.Generator]:
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _give_generator(sampler: RandomSampler) -> None:
    """Give a shuffling sampler a generator that can be made equal on all processes."""
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))


def _seedable(sampler: RandomSampler) -> RandomSampler:
    """Return a sampler that draws as one does, from a generator that is seeded at each epoch."""
    return RandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator(),
    )


def _is_regular(batches: list[list[Any]], size: int) -> bool:
    """Return whether all batches have `size` samples, the last one perhaps fewer."""
    full = all(len(batch) == size for batch in batches[:-1])
    return bool(batches) and full and len(batches[-1]) <= size
