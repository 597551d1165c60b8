"""Loaders whose counts the processes agree on, one global batch ahead (rule 17)."""

import logging
import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from typing_extensions import override

from trainkit.data.batch_sources import BatchSource
from trainkit.data.fetch import RankBatch, counted
from trainkit.data.loader import EpochLength, LoaderContext, PreparedLoader
from trainkit.data.order import length_of
from trainkit.data.window import MicroBatch, PaddingBatch, Window
from trainkit.distributed.collectives import are_alike, number_of
from trainkit.errors import DataError

logger = logging.getLogger(__name__)

# What a process sends instead of its count.
_FAILED = -1  # its data raised
_NO_BATCH = -2  # it has no samples, and no batch that it could repeat

_NOTHING = RankBatch(0)  # what a process has after its end


@dataclass(slots=True)
class _GlobalBatch:
    """What all processes know of a global batch that they have read, and this process's share."""

    counts: tuple[int, ...]
    total: int
    pending: Any = None  # on its way to the device
    fallback: tuple[Any, int] | None = None
    state: Any = None  # of the data set after it
    fault: Exception | None = None  # raised when it is due
    lacking: int | None = None  # a process that has nothing to repeat


class AgreedLoader(PreparedLoader):
    """A prepared loader over streams, keys of whole batches, or loaders of other kinds.

    Args:
        batch_source: Where this process's batches come from.
        batch_size: Samples of one process in a full global batch; None where that varies.
        whole: Whether the epoch ends before the first global batch that is not full.
        samples_per_epoch: Samples of an epoch, where known.
        batches_per_epoch: Global batches of an epoch, where known.
    """

    def __init__(
        self,
        source: Any,
        batch_source: BatchSource,
        context: LoaderContext,
        *,
        batch_size: int | None = None,
        whole: bool = False,
        samples_per_epoch: int | None = None,
        batches_per_epoch: int | None = None,
    ) -> None:
        super().__init__(source, context)
        self.batch_size = batch_size
        self.samples_per_epoch = samples_per_epoch
        self.batches_per_epoch = batches_per_epoch
        self._batch_source = batch_source
        self.rows_vary = batch_source.rows_vary
        self.stream = batch_source.stream
        self._least = 1  # samples of a global batch that is not the end
        if whole and batch_size is not None:
            self._least = self.processes.size * batch_size
        self._refuse_empty(length_of(getattr(source, "dataset", source)))

    @override
    def windows(
        self, epoch: int, *, position: int = 0, accumulation: int = 1, drop_last: bool = False
    ) -> Generator[Window, None, None]:
        micro_batches = self._micro_batches(epoch, position, accumulation)
        windows = 0
        with self._under_way(), closing(micro_batches):
            for window in self._cut(micro_batches, accumulation if drop_last else None):
                windows += 1
                yield window
        if position == 0:
            self._known_length = EpochLength(0, windows, 0)
            if not windows:
                self._refuse_idle(epoch)
        if self.stream is not None:
            self.stream.ended()

    @override
    def batches(self, epoch: int, *, position: int = 0) -> Generator[MicroBatch, None, None]:
        micro_batches = self._micro_batches(epoch, position, math.inf)
        with self._under_way(), closing(micro_batches):
            yield from self._announced(micro_batches)
        if self.stream is not None:
            self.stream.ended()

    @override
    def order_digest(self, epoch: int, accumulation: int) -> str | None:
        return self._batch_source.order_digest(epoch)

    @override
    def forget_order(self) -> None:
        self._batch_source.forget_order()

    @override
    def close(self) -> None:
        self._batch_source.close()

    def _cut(self, micro_batches: Iterator[MicroBatch], full: int | None) -> Iterator[Window]:
        """Yield the windows; with `full`, not a last one of fewer micro-batches or samples."""
        if full is None:
            for first in micro_batches:
                parts = self._announced(_window_of(first, micro_batches))
                yield Window(parts)
                for _ in parts:  # what the caller left of the window
                    pass
            return
        nominal = self.nominal_window(full)
        following = next(micro_batches, None)
        while following is not None:
            read = list(_window_of(following, micro_batches))
            total = sum(part.total for part in read)
            following = next(micro_batches, None)
            is_short = len(read) < full or (nominal is not None and total < nominal)
            if following is not None or not is_short:
                yield Window(self._announced(read), total, len(read))

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        if self.active is None:
            yield
            return
        self.active.began(self)
        try:
            yield
        finally:
            self.active.ended(self)

    def _announced(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches, which may have been read ahead; each is under way from then on."""
        for micro_batch in micro_batches:
            if self.active is not None:
                own = micro_batch.count if self.rows_vary else None
                self.active.yielded(self, micro_batch.counts, micro_batch.size, own=own)
            if self.stream is not None:
                self.stream.inside, self.stream.state = True, micro_batch.state
            yield micro_batch

    def _micro_batches(
        self, epoch: int, position: int, accumulation: float
    ) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches from `position` on; `math.inf` makes one window of them all."""
        rank = self.processes.rank
        padding = PaddingBatch()
        done, reading = self._begin(epoch, position)
        for current, ahead in self._global_batches(epoch, reading, accumulation):
            data, count = None, current.counts[rank]
            is_own = count > 0
            if is_own:
                data, count = counted(self._transfer.finish(current.pending), count)
                if ahead is None or not ahead.counts[rank]:
                    padding.keep(data, count)
            elif current.fallback is not None and not padding.size:
                first, rows = current.fallback
                padding.keep(self._transfer.finish(self._transfer.start(first)), rows)
            if done < position:
                done += current.total
                if done > position:
                    break
                continue
            if not is_own:
                data = padding.take()
            last = ahead is None or self._is_end(ahead)
            size = count if is_own else padding.size
            yield MicroBatch(data, count, current.total, last, current.counts, size, current.state)
        if done != position and position:
            raise DataError(
                f"The position is {position}, but no global batch starts there: one ends after "
                f"{done} samples. Keep the global batch and the data set of the checkpoint."
            )

    def _begin(self, epoch: int, position: int) -> tuple[int, Iterator[_GlobalBatch]]:
        """Return how many samples were consumed where the batches begin, and the batches."""
        start, stream = None, self.stream
        if stream is not None:
            start, stream.start = stream.start, None
            stream.first = stream.first if position else None
        if stream is not None and start is not None and start["state"] is not None:
            if start["inside"] and start["state"]["ended"] and not stream.is_sharded:
                stream.start = {**start, "inside": False}  # the next pass follows this one
                return position, repeat(_GlobalBatch((0,) * self.processes.size, 0))
            passed = start["state"].get("batches", 0) if start["inside"] else 0
            batches = self._batch_source.rank_batches(epoch, position, start)
            return position, self._limited(self._read(batches), passed)
        if position:
            logger.warning(
                "`%s` cannot jump to a position: the first %d samples of epoch %d are read again.",
                type(self.source).__name__,
                position,
                epoch,
            )
        # What a limit leaves of an epoch is known in batches, which are counted from its start.
        jumps = self._batch_source.finds_position and self.limit is None
        done = position if jumps else 0
        return done, self._limited(self._read(self._batch_source.rank_batches(epoch, done)), 0)

    def _limited(self, reading: Iterator[_GlobalBatch], passed: int) -> Iterator[_GlobalBatch]:
        """Yield what a limit leaves of an epoch of which so much has passed, then its end."""
        if self.limit is None:
            yield from reading
            return
        for number, batch in enumerate(islice(reading, self.limit - passed), passed + 1):
            if batch.state is not None:
                batch.state = {**batch.state, "batches": number}
            yield batch
        yield from repeat(_GlobalBatch((0,) * self.processes.size, 0))

    def _global_batches(
        self, epoch: int, reading: Iterator[_GlobalBatch], accumulation: float
    ) -> Iterator[tuple[_GlobalBatch, _GlobalBatch | None]]:
        """Yield each global batch of the epoch, and inside a window the one after it.

        What follows a window is read after its update, which a data set may depend on.
        """
        ahead, left = next(reading), accumulation
        while not self._is_end(ahead):
            current = ahead
            if current.fault is not None:
                raise current.fault
            if current.lacking is not None:
                raise DataError(
                    f"Process {current.lacking} has no batch in epoch {epoch}, while others have, "
                    f"so it cannot take part in their collectives. {self._batch_source.advice}"
                )
            left = (left or accumulation) - 1
            following = next(reading) if left else None
            yield current, following
            ahead = next(reading) if following is None else following

    def _read(self, batches: Iterator[RankBatch]) -> Iterator[_GlobalBatch]:
        """Yield global batches for ever; no error is raised before all processes know of it."""
        has_some, is_first = False, True
        while True:
            batch, fault = RankBatch(_FAILED), None
            try:
                batch = next(batches, _NOTHING)
            except Exception as error:
                fault = error
            has_some = has_some or batch.count > 0 or batch.fallback is not None
            message = batch.count if batch.count or has_some else _NO_BATCH
            everywhere = (1,) * self.processes.size
            if are_alike(self.processes, message):  # then only one number travels
                messages = [message for _ in everywhere]
            else:
                own = torch.tensor([message])
                messages = self.processes.all_gather(own, everywhere).tolist()
            if fault is None and _FAILED in messages:
                rank = messages.index(_FAILED)
                fault = DataError(
                    f"Process {rank} could not read its next batch; its own report says why."
                )
                fault.origin = rank
            if self.stream is not None and _FAILED not in messages:
                number = number_of(self.stream.first or batch.first)
                alike = not is_first or are_alike(self.processes, number)
                self.stream.began(batch.first, alike or self.stream.is_sharded)
                is_first = False
            counts = tuple(max(message, 0) for message in messages)
            pending = self._transfer.start(batch.data) if batch.count > 0 else None
            lacking = messages.index(_NO_BATCH) if _NO_BATCH in messages else None
            total = sum(counts)
            yield _GlobalBatch(counts, total, pending, batch.fallback, batch.state, fault, lacking)

    def _is_end(self, ahead: _GlobalBatch) -> bool:
        is_end = ahead.fault is None and ahead.total < self._least
        if is_end and self.stream is not None:
            # Noted at once: whoever knows that a batch is the last may leave the pass after it.
            self.stream.end = ahead.state
        return is_end


def _window_of(first: MicroBatch, following: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    yield first
    if first.last:
        return
    for micro_batch in following:
        yield micro_batch
        if micro_batch.last:
            return
