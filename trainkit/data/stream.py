"""Reads this process's slices of an iterable data set (rule 17)."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from trainkit.basics import rng
from trainkit.basics.torch_internals import in_no_worker
from trainkit.containers.tree import count_samples, map_leaves
from trainkit.data.fetch import Fetch, RankBatch, collates_silently, counted, recounted
from trainkit.data.loader import LoaderContext
from trainkit.data.order_facts import digest_of
from trainkit.data.stream_start import (
    StreamStart,
    forget_loaded,
    is_huggingface,
    is_same,
    is_stateful,
)
from trainkit.errors import DataError


class StreamReader(Fetch):
    """Reads a whole stream and keeps the slices of one process.

    Every worker of every process reads the same stream, so that nothing depends on their number.
    A stream with `shard(num_shards, index)` is asked for the share of this process instead.

    Args:
        batch_size: Samples of one process in a global batch; None where the stream yields batches.
    """

    def __init__(
        self, loader: DataLoader[Any], context: LoaderContext, batch_size: int | None
    ) -> None:
        super().__init__(loader.dataset, context)
        self.seeds = context.sample_seeding
        self._rank, self._size = context.processes.rank, context.processes.size
        # Some cannot be cut into more shards than they have files, and tell the number.
        most = getattr(self.dataset, "num_shards", None)
        can_shard = callable(getattr(self.dataset, "shard", None))
        can_shard = can_shard and not (isinstance(most, int) and most < self._size)
        self.is_sharded = self._size > 1 and can_shard
        self.shards = self._size if self.is_sharded else 1
        # What a shard had read must be known after its end too, where it may be asked for it.
        self._merges = self.is_sharded and hasattr(self.dataset, "merge_state_dicts")
        self._collate: Any = loader.collate_fn
        self._seeds_collate = self.seeds and not collates_silently(self._collate)
        self._batch_size = batch_size
        self.rows_vary = batch_size is not None and not collates_silently(self._collate)
        self._whole = loader.drop_last and not self.in_training  # keeps no incomplete batch
        self._run: int | None = None
        self._digest: str | None = None  # of the first sample of the pass
        self._iterator: Iterator[Any] = iter(())
        self._data: Any = self.dataset  # what is read: the data set, or the shard of this process
        self._start: StreamStart | None = None  # where the pass has begun, if that has a state
        self._owner: Any = None  # who tells the state: the iterator, or the data set
        self._prior: Any = None  # the state before the latest item
        self._state: dict[str, Any] | None = None  # after the latest batch
        self.start: tuple[int, Any] | None = None  # a pass, and what it begins with
        self.returns = not context.trains  # whether a pass leaves the data set as it was
        self.is_over = False  # whether the latest pass was used to its end

    @override
    def fetch(self, epoch: int, task: tuple[int, int, int, bool]) -> RankBatch:
        """Return this process's share of a global batch.

        Args:
            epoch: The epoch of the samples' keys.
            task: The pass (any number that differs between passes), the samples that were
                consumed before the pass, the global batch, counted from there, not falling, and
                whether the pass before was read to its end. (What was read ahead may have come
                to the end of one that was left.)
        """
        run, position, index, follows = task
        if run != self._run:
            self.is_over = follows
            with in_no_worker():
                self.leave()
                self._begin(run, epoch, position)
            self._run = run
        batch = self._rank_batch(index)
        return replace(batch, state=self._taken_state(), first=self._digest)

    def leave(self) -> None:
        """Let the data set come back to where the pass began, unless one of training is over."""
        start, self._start = self._start, None
        self._iterator = iter(())
        if start is not None:
            with rng.preserved():
                start.leave(self._peek, is_over=self.is_over and not self.returns)

    def _begin(self, run: int, epoch: int, position: int) -> None:
        self._epoch, self._at, self._next = epoch, 0, 0
        self._ended, self._digest = False, None
        self._first: list[Any] = []
        self._prior = self._state = self._owner = None
        self._data = data = self._shard() if self.is_sharded else self.dataset
        # Nobody reads a shard again, and those of Hugging Face begin anew by themselves.
        if data is self.dataset and is_stateful(data) and not is_huggingface(data):
            self._start = StreamStart(data)
        start = self.start[1] if self.start is not None and self.start[0] == run else None
        if start is not None and start["inside"]:
            if self._start is not None:
                self._start.resume()
            self._go_on(start["state"], start.get("first"))
            return
        if start is not None and self._start is not None and "dataset" in start["state"]:
            self._start.follow(start["state"]["dataset"])
        self._open()
        done = 0
        while done < position:
            items = self._read(1)
            if not items:
                break
            done += 1 if self._batch_size is not None else count_samples(items[0])
        if done != position:
            raise DataError(
                f"The position is {position} samples into epoch {epoch}, but the stream "
                f"`{type(self.dataset).__name__}` has no boundary there: it is at {done} after "
                f"{self._at} items. Resume with the data set of the checkpoint."
            )

    def _open(self, kind: str = "", state: Any = None) -> None:
        """Make the iterator; "dataset", "iterator" or nobody takes a state before."""
        if kind == "dataset":
            self._data.load_state_dict(copy.deepcopy(state))
        if self.seeds:
            rng.seed_host(rng.derive(self.seed, "stream", self._epoch))
        self._iterator = iter(self._data)
        owners = [one for one in (self._iterator, self._data) if is_stateful(one)]
        self._owner = owners[0] if owners else None
        if kind == "iterator":
            self._owner.load_state_dict(copy.deepcopy(state))
        if kind == "dataset":
            self._iterator = _read_once(self._iterator, self._data)

    def _peek(self) -> Any:
        """Return the state after the first sample of a new iterator; None where it has none."""
        try:
            self._open()
            if self.seeds:
                rng.seed_host(self._key(0))
            next(self._iterator)
        except Exception:  # also its end
            return None
        finally:
            self._iterator = iter(())
        return copy.deepcopy(self._data.state_dict())

    def _go_on(self, state: dict[str, Any], first: str | None) -> None:
        """Begin where a state was taken, in a pass whose first sample has this digest."""
        self._at = state["items"]
        if state["ended"]:
            self._state, self._ended = state, True
            return
        kind = "iterator" if "iterator" in state else "dataset"
        if state["before_last"] is not None:
            # What `__iter__` draws before its first sample is drawn under the key of sample 0, and
            # the next sample must be under its own. So the last one is read again, and dropped.
            self._open(kind, state["before_last"])
            rng.seed_host(self._key(0))
            item = next(self._iterator, _END)
            if item is not _END and is_same(self._owner.state_dict(), state[kind]):
                if self._start is not None:
                    self._start.is_elsewhere(is_empty=False)
                return
            if item is not _END and state["items"] > 1 and _digest_of(item) == first:
                self._digest = "begins anew"  # the state was not taken
        self._open(kind, state[kind])

    def _taken_state(self) -> dict[str, Any] | None:
        """Return where the data set is, copied: it may go on to change what it returned."""
        if self._owner is None or not self.in_training:
            return self._state
        if self._state is not None and self._state["ended"]:
            return self._state
        kind = "dataset" if self._owner is self._data else "iterator"
        has_read_all = self._ended and self._merges
        self._state = {
            "items": self._at,
            "ended": self._ended,
            "before_last": self._prior if self.seeds else None,
            kind: self._prior if has_read_all else copy.deepcopy(self._owner.state_dict()),
        }
        return self._state

    def _rank_batch(self, index: int) -> RankBatch:
        share = self._batch_size or 1  # items of one process, perhaps whole batches
        start = 0 if self.is_sharded else self._rank * share
        many = share if self.is_sharded else self._size * share
        with in_no_worker():
            for _ in range((index - self._next) * many):
                if not self._read(1):
                    break
            key = self._key(self._at + start)
            items = self._read(many, keeps_prior=True)
        self._next = index + 1
        mine = items[start : start + share]
        if mine and not (self._whole and len(mine) < share):
            return self._made(mine, key)
        first = self._first if items and not index else []
        if self.is_sharded and not index and self._at:  # it had samples before
            first = list(islice(self._shard(), share))
        if not first:
            return RankBatch(0)
        fallback = self._made(first, self._key(0))
        return RankBatch(0, fallback=counted(fallback.data, fallback.count))

    def _made(self, items: list[Any], key: int) -> RankBatch:
        data = items if self._batch_size is not None else items[0]
        size = len(items) if self._batch_size is not None else count_samples(data)
        batch = self._collated(data, key)
        return RankBatch(size, recounted(batch, items, size) if self.rows_vary else batch)

    def _shard(self) -> Any:
        return self.dataset.shard(num_shards=self._size, index=self._rank)

    def _read(self, count: int, *, keeps_prior: bool = False) -> list[Any]:
        """Return the next `count` items, fewer at the end; keep the state before the last."""
        items: list[Any] = []
        keeps_prior = keeps_prior and self._owner is not None and self.in_training
        try:
            while len(items) < count and not self._ended:
                if keeps_prior and (self._merges or (self.seeds and len(items) == count - 1)):
                    self._prior = copy.deepcopy(self._owner.state_dict())
                if self.seeds:
                    rng.seed_host(self._key(self._at))
                item = next(self._iterator, _END)
                if self._start is not None and self._start.is_elsewhere(is_empty=item is _END):
                    self._open()
                elif item is _END:
                    self._ended = True
                else:
                    self._at += 1
                    if self._at == 1 and self.seeds and self.in_training:
                        self._digest = _digest_of(item)
                    if self._batch_size is not None or count_samples(item):
                        items.append(item)
        except Exception as error:
            self._ended = True
            error.add_note(
                f"Raised at sample {self._at} of the stream `{type(self.dataset).__name__}`, "
                f"epoch {self._epoch}."
            )
            raise
        wanted = (self._batch_size or 1) - len(self._first)
        if wanted > 0 and self._size > 1:
            self._first += items[:wanted]
        return items

    def _key(self, at: int) -> int:
        index = f"{at} of shard {self._rank} of {self._size}" if self.is_sharded else at
        return rng.sample_seed(self.seed, self._epoch, index)

    def _collated(self, samples: Any, key: int) -> Any:
        if self._seeds_collate:
            rng.seed_host(key)
        try:
            return self._collate(samples)
        except Exception as error:
            error.add_note(
                f"Raised while a batch was made of the samples before {self._at} of the stream "
                f"`{type(self.dataset).__name__}`, epoch {self._epoch}."
            )
            raise


_END = object()


def _digest_of(item: Any) -> str | None:
    return digest_of([repr(map_leaves(item, lambda x: digest_of([x])))])


def _read_once(iterator: Iterator[Any], dataset: Any) -> Iterator[Any]:
    """Yield what `iterator` does, of a data set that was given a state for it alone."""
    first = list(islice(iterator, 1))
    forget_loaded(dataset)
    yield from chain(first, iterator)
