"""Where batches come from if their counts are only known once they are read (rule 17)."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from trainkit.basics import rng
from trainkit.containers.tree import count_samples
from trainkit.data.fetch import Fetch, RankBatch
from trainkit.data.loader import LoaderContext
from trainkit.data.order import KeyedOrder, set_epoch_on
from trainkit.data.workers import Fetcher, datasets_of, fetcher_for

if TYPE_CHECKING:
    from trainkit.data.position import StreamPosition
    from trainkit.data.stream import StreamReader


class BatchSource(ABC):
    """Yields this rank's share of every global batch, as long as it has some."""

    finds_position: bool = False  # whether `rank_batches` begins after `position` by itself
    rows_vary: bool = False  # whether its batches may be `Recounted`
    stream: "StreamPosition | None" = None  # what a checkpoint keeps of an iterable data set
    advice: str  # for users where a process never had a batch

    @abstractmethod
    def rank_batches(self, epoch: int, position: int, start: Any = None) -> Iterator[RankBatch]:
        """Yield this process's share of each global batch.

        Where it has none of an epoch that others may have some of, one without samples that holds
        a `fallback` may come, which is repeated with weight 0.

        Args:
            position: Samples that were consumed before, where `finds_position`.
            start: What `stream` kept of the data set there.
        """

    def order_digest(self, epoch: int) -> str | None:
        """Return what tells the order of an epoch from others; None where it is not known."""
        return None

    def forget_order(self) -> None:
        """Let the sampler run again, where `order_digest` came before it was ready."""
        return

    def close(self) -> None:
        """Stop what runs in the background."""
        return


class StreamSource(BatchSource):
    """An iterable data set, read here or in workers.

    Args:
        loader: The loader of the user; its settings of workers are used.
    """

    advice = "Give the data set at least as many shards with samples as there are processes."

    def __init__(
        self, reader: "StreamReader", loader: DataLoader[Any], context: LoaderContext
    ) -> None:
        self._reader = reader
        self.rows_vary = reader.rows_vary
        self._loader = loader
        self._forwards_epoch = context.trains
        self._runs = count()
        self._fetcher_of = partial(fetcher_for, loader=loader, context=context, alone=True)
        self._workers: Fetcher | None = None
        self._readers: list[StreamReader] = []  # of the passes under way in this process
        if context.trains:
            from trainkit.data.position import StreamPosition  # other data needs none of it

            self.stream = StreamPosition(loader, reader.shards)
        # A position counts the samples of all shards, which one shard alone cannot find.
        self.finds_position = not reader.is_sharded

    @override
    def rank_batches(self, epoch: int, position: int, start: Any = None) -> Iterator[RankBatch]:
        # In this order: workers are copies, made when a pass begins, so the data set must have
        # heard of its epoch, and the reader of where it begins, before there are any.
        if start is not None:
            self.close()  # those under way would not hear of it
        if self._forwards_epoch:
            set_epoch_on(datasets_of(self._loader.dataset), epoch)
        run = next(self._runs)
        self._reader.start = None if start is None else (run, start)
        follows, self._reader.is_over = self._reader.is_over, False
        tasks = partial(map, lambda index: (run, position, index, follows), count())
        if self._loader.num_workers > 0:
            reader = self._reader
            fetcher = self._workers = self._workers or self._fetcher_of(reader)
        else:
            # A reader of its own, so that passes at the same time do not disturb each other.
            reader = copy.copy(self._reader)
            reader.returns |= self.stream is not None and self.stream.is_trial
            fetcher = self._fetcher_of(reader)
            self._readers.append(reader)
        batches = fetcher.batches(epoch, tasks)
        try:
            for batch in batches:
                reader.is_over = not batch.count or (batch.state or {}).get("ended", False)
                yield batch
        finally:
            batches.close()
            reader.leave()
            self._readers = [one for one in self._readers if one is not reader]

    @override
    def close(self) -> None:
        for reader in self._readers:
            reader.leave()
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class KeySource(BatchSource):
    """A map-style data set whose sampler yields the keys of whole batches (`batch_size=None`)."""

    advice = "Give the sampler a key of a batch that has samples."

    def __init__(
        self, order: KeyedOrder, fetch: Fetch, fetcher: Fetcher, context: LoaderContext
    ) -> None:
        self._order = order
        self._fetch = fetch
        self._fetcher = fetcher
        self._rank, self._size = context.processes.rank, context.processes.size
        self._forwards_epoch = context.trains
        self._latest: tuple[int, list[Any]] | None = None  # the epoch under way in training

    @override
    def order_digest(self, epoch: int) -> str | None:
        from trainkit.data.order_facts import digest_of  # only checkpoints need it

        return digest_of(self._keys(epoch))

    @override
    def forget_order(self) -> None:
        self._latest = None

    @override
    def rank_batches(self, epoch: int, position: int, start: Any = None) -> Iterator[RankBatch]:
        keys, has_some = self._keys(epoch), False
        mine = keys[self._rank :: self._size]
        for batch in _filled(self._fetcher.batches(epoch, partial(iter, mine))):
            has_some = True
            yield batch
        if keys and not has_some:
            batch = self._fetcher.fetch(epoch, keys[0])
            if size := count_samples(batch):
                yield RankBatch(0, fallback=(batch, size))

    @override
    def close(self) -> None:
        self._fetcher.close()

    def _keys(self, epoch: int) -> list[Any]:
        if self._latest is not None and self._latest[0] == epoch:
            return self._latest[1]
        if self._forwards_epoch:
            set_epoch_on([*self._order.samplers, *datasets_of(self._fetch.dataset)], epoch)
        order = self._order.run(epoch)
        keys: list[Any] = order.tolist() if isinstance(order, torch.Tensor) else order
        if self._forwards_epoch:
            self._latest = epoch, keys
        return keys


class CustomSource(BatchSource):
    """Any iterable of batches, read as it is."""

    advice = "Give each process's loader at least one batch."

    def __init__(self, loader: Any, context: LoaderContext) -> None:
        self._loader = loader
        self._seed = context.seed
        self._rank = context.processes.rank
        self._forwards_epoch = context.trains
        # Batches that are there already draw nothing.
        self._draws = context.sample_seeding and not isinstance(loader, list | tuple)

    @override
    def rank_batches(self, epoch: int, position: int, start: Any = None) -> Iterator[RankBatch]:
        loader = self._loader
        if self._forwards_epoch:
            batch_sampler = getattr(loader, "batch_sampler", None)
            parts = [loader, getattr(loader, "sampler", None), batch_sampler]
            parts += [getattr(batch_sampler, "sampler", None)]
            set_epoch_on(parts + datasets_of(getattr(loader, "dataset", None)), epoch)
        stream = rng.derive(rng.order_seed(self._seed, epoch), "process", self._rank)
        yield from _filled(self._batches(stream))

    def _batches(self, stream: int) -> Iterator[Any]:
        """Yield the batches; what the loader draws for each is under the key of its number.

        So what a resume reads again comes as before, and moves none of the run's own streams.
        """
        iterator: Iterator[Any] | None = None
        for number in count():
            keyed = self._draws or iterator is None
            with rng.preserved() if keyed else nullcontext():
                if keyed:
                    rng.seed_host(rng.in_stream(stream, number) if number else stream)
                iterator = iter(self._loader) if iterator is None else iterator
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch


class Presharded:
    """A loader that holds this process's own share of the data."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def presharded(loader: Any) -> Presharded:
    """Mark `loader` as holding this process's own share, so that trainkit does not cut it again.

    The shares may differ in length: a process that runs out takes part in the others' steps with
    weight 0. Each needs at least one batch.
    """
    return Presharded(loader)


def _filled(batches: Iterator[Any]) -> Iterator[RankBatch]:
    for batch in batches:
        size = count_samples(batch)
        if size:  # an empty one would look like the end
            yield RankBatch(size, batch)
