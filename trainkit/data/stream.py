"""Reads this process's slices of an iterable data set (DESIGN 2.17)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from trainkit import rng
from trainkit.data.fetch import Fetch, collates_silently
from trainkit.data.tree import count_samples
from trainkit.errors import DataError

__all__ = ["Piece", "StreamReader"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one process has of a round.

    Args:
        count: Its samples; 0 where it has none.
        data: Their batch; None where it has none.
        spare: A batch of the stream's first samples and their number, for a process that never
            had any.
    """

    count: int
    data: Any = None
    spare: tuple[Any, int] | None = None


class StreamReader(Fetch):
    """Reads a whole stream and keeps the slices of one process.

    Every worker of every process reads the same stream, so that nothing depends on their number.
    A stream with `shard(num_shards, index)` is asked for the share of this process instead.

    Args:
        dataset: The iterable data set.
        collate: Turns a list of samples into a batch, or converts a batch of the stream.
        seed: The seed of the run, or of evaluation.
        batch_size: Samples of one process in a round; None where the stream yields batches.
        rank: This process.
        size: Number of processes.
        sample_seeding: Whether reading runs under the keys of the stream's positions.
        whole: Whether incomplete batches of one process are left out.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Any,
        *,
        seed: int,
        batch_size: int | None,
        rank: int,
        size: int,
        sample_seeding: bool,
        whole: bool,
    ) -> None:
        super().__init__(dataset, seed)
        self.seeds = sample_seeding
        self.is_sharded = size > 1 and _can_shard(dataset, size)
        self._collate = collate
        self._seeds_collate = sample_seeding and not collates_silently(collate)
        self._batch_size = batch_size
        self._rank = rank
        self._size = size
        self._whole = whole
        self._run: int | None = None
        self._iterator: Iterator[Any] = iter(())

    @override
    def fetch(self, epoch: int, task: tuple[int, int, int]) -> Piece:
        """Return the piece of a round.

        Args:
            epoch: The epoch of the samples' keys.
            task: The pass (any number that differs between passes), the samples that were
                consumed before the pass, and the round, counted from there, not falling.
        """
        run, position, index = task
        if run != self._run:
            self._begin(epoch, position)
            self._run = run
        if self._batch_size is None:
            return self._batch_of_stream(index)
        return self._slice_of_round(index, self._batch_size)

    def _begin(self, epoch: int, position: int) -> None:
        self._epoch, self._at, self._next, self._ended = epoch, 0, 0, False
        self._first: list[Any] = []
        dataset = self.dataset
        if self.is_sharded:
            dataset = dataset.shard(num_shards=self._size, index=self._rank)
        if self.seeds:
            rng.seed_host(rng.derive(self.seed, "stream", epoch))
        self._iterator = iter(dataset)
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

    def _slice_of_round(self, index: int, share: int) -> Piece:
        start = 0 if self.is_sharded else self._rank * share
        many = share if self.is_sharded else self._size * share
        self._skip((index - self._next) * many)
        self._next = index + 1
        key = self._key(self._at + start)
        samples = self._read(many)
        mine = samples[start : start + share]
        if self._whole and len(mine) < share:
            mine = []
        if mine:
            return Piece(len(mine), self._collated(mine, key))
        if index or self.is_sharded or not samples:
            return Piece(0)
        return Piece(0, spare=(self._collated(self._first, self._key(0)), len(self._first)))

    def _batch_of_stream(self, index: int) -> Piece:
        many = 1 if self.is_sharded else self._size
        self._skip((index - self._next) * many)
        self._next = index + 1
        start = 0 if self.is_sharded else self._rank
        key = self._key(self._at + start)
        items = self._read(many)
        if start < len(items):
            return Piece(count_samples(items[start]), self._collated(items[start], key))
        if index or self.is_sharded or not items:
            return Piece(0)
        first = self._first[0]
        return Piece(0, spare=(self._collated(first, self._key(0)), count_samples(first)))

    def _skip(self, many: int) -> None:
        for _ in range(many):
            if not self._read(1):
                return

    def _read(self, many: int) -> list[Any]:
        """Return the next `many` items of the stream, fewer at its end."""
        items: list[Any] = []
        try:
            while len(items) < many and not self._ended:
                if self.seeds:
                    rng.seed_host(self._key(self._at))
                item = next(self._iterator)
                self._at += 1
                if self._batch_size is not None or count_samples(item):
                    items.append(item)
        except StopIteration:
            self._ended = True
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


def _can_shard(dataset: Any, size: int) -> bool:
    # Some data sets cannot be cut into more shards than they have files, and tell the number.
    most = getattr(dataset, "num_shards", None)
    return callable(getattr(dataset, "shard", None)) and not (isinstance(most, int) and most < size)
