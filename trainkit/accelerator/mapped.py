"""Map-style data of a loop of the user's own: the sampler runs as under Accelerate."""

import copy
import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler, get_worker_info
from typing_extensions import override

from trainkit.accelerator.loader import SharedLoader, Sharing, State
from trainkit.basics import rng
from trainkit.basics.device import get_rng_state, set_rng_state
from trainkit.basics.torch_internals import samples_asked_for
from trainkit.data import MicroBatch
from trainkit.data.mapped import MappedLoader
from trainkit.data.order import divide, set_epoch_on, whole_order
from trainkit.data.order_facts import OWN, changed_facts, digest_of, run_to
from trainkit.data.plan import BatchPlan, FlatPlan, Plan
from trainkit.data.workers import datasets_of
from trainkit.distributed import Processes
from trainkit.errors import CheckpointError


class MappedShare(SharedLoader):
    """A loader over a map-style data set.

    On one process samplers draw what they draw under torch's own loader. On several the order is
    that of process 0. What is random inside the data set is drawn from streams that are keyed by
    epoch and sample, so it differs between samples and not between runs (rule 13).

    Args:
        seed: What set the order apart from others, equal on all processes.
    """

    fills_up = True

    def __init__(self, inner: MappedLoader, sharing: Sharing, seed: int) -> None:
        super().__init__(inner, sharing)
        self._seed = seed
        self._rank, self._size = sharing.processes.rank, sharing.processes.size
        batch_sampler = self.source.batch_sampler
        parts = (getattr(batch_sampler, "sampler", None), batch_sampler)
        self._samplers = [part for part in parts if part is not None]
        self._sampler, self._is_flat = inner.order.sampler, not inner.order.yields_batches
        self._batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self._drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if sharing.configuration.split_batches and self._batch_size is not None:
            self._batch_size = divide(self._batch_size, self._size)
        self.full_size = self._batch_size
        self._seedable: RandomSampler | None = None
        wanted = sharing.configuration.use_seedable_sampler and self._is_flat
        if wanted and type(self._sampler) is RandomSampler:
            # It draws as that one does, from a generator that is seeded at each epoch.
            self._seedable = RandomSampler(
                self._sampler.data_source,
                replacement=self._sampler.replacement,
                num_samples=samples_asked_for(self._sampler),
                generator=torch.Generator(),
            )
        elif (
            self._size > 1
            and isinstance(self._sampler, RandomSampler)
            and (self._sampler.generator is None)
        ):  # else each would have an order of its own
            seed_of_order = int(torch.empty((), dtype=torch.int64).random_())
            self._sampler.generator = torch.Generator().manual_seed(seed_of_order)
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
        own = {"samples of a global batch": self._batch_size and self._batch_size * self._size}
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
            why = self._find(order, digest)
        return why if why == OWN else ""  # another order is allowed between two passes

    @override
    def loses_place(self, state_dict: dict[str, Any]) -> str:
        order, digest = state_dict["order"], state_dict.get("digest")
        if not self._is_flat or order is None or digest is None:
            return "its place in the data is not known"
        changed = "; ".join(changed_facts(state_dict["facts"], self.order_facts()))
        more = len(order["generators"]) - len(self._generators())
        shuffles = type(self._sampler) is RandomSampler and self._seedable is None
        if changed or (more and not (shuffles and abs(more) == 1)):
            return changed or "its generators are others"
        return self._find(order, digest)

    @override
    def __len__(self) -> int:
        count = len(self._sampler)
        key = (count, self.even_batches)
        if key not in self._lengths:
            order = torch.arange(count) if self._is_flat else [[0] * self._size] * count
            plan = self._plan(order)
            self._lengths[key] = plan.length - len(plan.lacking)
        return self._lengths[key]

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._set_epoch_on_parts()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generators": self._generator_states()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_generators(state_dict["generators"])

    @override
    def _batches(self, skip: int, resumption: State | None) -> Iterator[MicroBatch]:
        self._set_epoch_on_parts()
        self._run_sampler(resumption)
        self.may_lack_batches, plan = not self.even_batches, self._plan(self._drawn)
        own = [index for index in range(plan.length) if index not in plan.lacking]
        self._length = len(own)
        # Accelerate reads one batch ahead, and a short one reads the sampler to its end.
        full = plan.local_size(0) * self._size if own else 0
        whole = bool(own) and plan.shares(own[-1])[1] == full
        self._inside = len(own) - (1 if whole else 2)
        if skip >= len(own):
            return
        first, stop = own[skip], own[-1] + 1
        batches = self._inner.micro_batches(plan, self.epoch, first, stop, stop - first)
        if not self._sharing.configuration.sample_seeding and self.device.type == "cpu":
            batches = _one_ahead(batches)  # to others they are sent one ahead anyway
        for index, batch in enumerate(batches, first):
            if index not in plan.lacking:
                if not self._rows_vary:
                    batch.size = plan.local_size(index)  # with what fills it up
                yield batch

    @override
    def _leave(self) -> None:
        order = self._order
        if order is not None and 0 < self._position <= self._inside:
            # Leaving early must not consume the sampler's final draws: Accelerate prefetches one
            # batch only.
            self._set_generators(order["generators_inside"])
        super()._leave()
        if self._may_keep_state:
            self._order = order

    def _set_epoch_on_parts(self) -> None:
        set_epoch_on([*self._samplers, *datasets_of(self.source.dataset)], self.epoch)

    def _plan(self, order: Any) -> Plan:
        """Cut what the sampler yields, samples or batches, into global batches."""
        batch_size, cut = self._batch_size, {"rank": self._rank, "size": self._size}
        if not self._is_flat:
            batches = [list(batch) for batch in order]
            split = self._sharing.configuration.split_batches and self._size > 1
            batch_size = getattr(self._sampler, "batch_size", None)
            if type(batch_size) is not int or split or not _is_regular(batches, batch_size):
                if self._drop_last and not split:
                    batches = batches[: len(batches) - len(batches) % self._size]
                return BatchPlan(batches, split=split, fill=self.even_batches, **cut)
            order = [index for batch in batches for index in batch]
        if self._drop_last:
            order = order[: len(order) - len(order) % (batch_size * self._size)]
        return FlatPlan(order, batch_size=batch_size, fill=self.even_batches, **cut)

    def _run_sampler(self, resumption: State | None) -> None:
        """Draw all that the sampler yields in this pass; notes what the order is made from."""
        if resumption is None or resumption["order"] is None:
            sharing = self._sharing
            take_from_process_0(sharing.processes, sharing.rng_types, self._generators())
            self._order = self._order_state()
            self._drawn, self._digest = self._draw(), None
            return
        order, digest = resumption["order"], resumption.get("digest")
        after = order["generators_after"]
        if digest is None:  # of an older state, or of what is not made of plain values
            self._draw_again(order)
        elif why := self._find(order, digest):
            raise CheckpointError(
                f"The pass that the state was saved in cannot go on: {why}. Samples would come "
                "twice or never. Use the same sampler, or a state that was saved between two "
                "passes."
            )
        self._set_generators(after)

    def _find(self, order: dict[str, Any], digest: str) -> str:
        """Draw the order of an earlier pass again; return why that is not to be had, in words."""
        return run_to(digest, order.get("runs", 1), lambda: self._draw_again(order))

    def _draw_again(self, order: dict[str, Any]) -> str | None:
        """Run the sampler on the random streams of an earlier pass; return the order's digest."""
        host, states, epoch = rng.save_host(), self._generator_states(), self.epoch
        python, numpy, cpu = order["host"]
        try:
            self.epoch, self._order = order.get("epoch", epoch), order
            self._set_epoch_on_parts()
            rng.restore_host((python, numpy, cpu))
            more = len(order["generators"]) - len(self._generators())
            with _generators_as_saved(self._sampler, more):
                self._set_generators(order["generators"])
                self._drawn, self._digest = self._draw(alone=more < 0), None
            return self._order_digest()
        finally:
            self._set_generators(states)
            rng.restore_host(host)
            self.epoch = epoch

    def _draw(self, *, alone: bool = False) -> list[Any]:
        # What torch's own loader draws for its workers: what comes after it stays the same.
        drawn = torch.empty((), dtype=torch.int64).random_(generator=self.source.generator)
        if isinstance(starts := self.source.worker_init_fn, _StartAsTorch):
            starts.base_seed = int(drawn)
        if self._seedable is not None:
            assert isinstance(self._seedable.generator, torch.Generator)
            given = self._sharing.configuration.data_seed
            seed = self._seed if given is None else given
            self._seedable.generator.manual_seed(seed + self.epoch)
            return list(self._seedable)
        own = bool(_generators_of(self._samplers))
        if self._size == 1 or alone or own or type(self._sampler) is SequentialSampler:
            reading = iter(self._sampler)
            order = list(islice(reading, 1))
            self._order["generators_inside"] = self._generator_states()
            order += whole_order(reading, self.source.dataset)
        else:  # it may draw from global generators, which differ between processes
            with rng.preserved():
                rng.seed_host(rng.order_seed(self._seed, self.epoch))
                order = whole_order(self._sampler, self.source.dataset)
        self._order["generators_after"] = self._generator_states()
        return order

    def _order_state(self) -> dict[str, Any]:
        states = self._generator_states()
        return {
            "host": rng.save_host(),
            **dict.fromkeys(("generators", "generators_inside", "generators_after"), states),
            "epoch": self.epoch,
            "runs": (self._order or {}).get("runs", 0) + 1,
        }

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _generators(self) -> list[torch.Generator]:
        """Return the samplers' and the loader's own generators."""
        return _generators_of([*self._samplers, self.source])

    def _set_generators(self, states: list[Any]) -> None:
        generators = self._generators()
        fits = len(states) == len(generators)  # else the next pass comes from these
        for generator, state in zip(generators, states, strict=True) if fits else ():
            generator.set_state(state)


class _StartAsTorch:
    """Starts the generators of a worker as torch's own loader does.

    Args:
        then: What the user wants of a worker.
    """

    def __init__(self, then: Any) -> None:
        self.base_seed = 0  # drawn by each pass
        self._then = then

    def __call__(self, worker: int) -> None:
        seed = self.base_seed + worker
        object.__setattr__(get_worker_info(), "seed", seed)
        random.seed(seed)
        torch.manual_seed(seed)
        if importlib.util.find_spec("numpy"):
            numpy = importlib.import_module("numpy.random")
            parts = [worker, self.base_seed & 0xFFFFFFFF, self.base_seed >> 32, 0]
            numpy.seed(numpy.SeedSequence(parts).generate_state(4))
        if self._then is not None:
            self._then(worker)


def drawing_as_torch(loader: Any) -> Any:
    """Return a loader whose workers start their generators as those of torch's own do."""
    if getattr(loader, "num_workers", 0):
        loader = copy.copy(loader)
        loader.worker_init_fn = _StartAsTorch(loader.worker_init_fn)
    return loader


def _one_ahead(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield batches when the next one has been read, as Accelerate does."""
    ahead = next(batches, None)
    while ahead is not None:
        ready, ahead = ahead, next(batches, None)
        yield ready


def take_from_process_0(
    processes: Processes, wanted: Sequence[str], generators: Sequence[torch.Generator]
) -> None:
    """Take the states of the generators of process 0; see `Sharing` for `wanted`."""
    if processes.size == 1:
        return
    broadcast = processes.broadcast
    if "generator" in wanted:
        for generator in generators:
            generator.set_state(broadcast(generator.get_state()))
    if "torch" in wanted:
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    if (device := processes.device).type in wanted:
        set_rng_state(broadcast(get_rng_state(device)), device)


@contextmanager
def _generators_as_saved(sampler: Any, more: int) -> Iterator[None]:
    """Give a shuffling sampler a generator, or take its own, while it draws an order again.

    One process shuffles by the global one, several by one of the sampler's.

    Args:
        more: How many more generators there were when the order was drawn.
    """
    own = getattr(sampler, "generator", None)
    if more:
        sampler.generator = torch.Generator() if more > 0 else None
    try:
        yield
    finally:
        if more:
            sampler.generator = own


def _generators_of(parts: Sequence[Any]) -> list[torch.Generator]:
    generators = [getattr(part, "generator", None) for part in parts]
    return list({id(one): one for one in generators if isinstance(one, torch.Generator)}.values())


def _is_regular(batches: list[list[Any]], size: int) -> bool:
    """Return whether all batches have `size` samples, the last one perhaps fewer."""
    full = all(len(batch) == size for batch in batches[:-1])
    return bool(batches) and full and len(batches[-1]) <= size
