"""Loaders whose counts the processes agree on, one round ahead (rule 17)."""

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainkit.data.feeds import Feed
from trainkit.data.loader import PreparedLoader, length_of
from trainkit.data.loader_context import LoaderContext
from trainkit.data.repeat import Repeat
from trainkit.data.stream import Piece
from trainkit.data.transfer import Transfer, transfer_for
from trainkit.data.window import MicroBatch, Window
from trainkit.errors import DataError

if TYPE_CHECKING:
    from trainkit.distributed.processes import Processes

__all__ = ["AgreedLoader"]

logger = logging.getLogger(__name__)

# What a process says instead of its count.
_FAILED = -1  # its data raised
_LACKS = -2  # it has no samples, and no batch that it could repeat
_COUNT_BYTES = 8


@dataclass(slots=True)
class _Round:
    """A round that all processes have read: its counts, and what this process has of it."""

    counts: tuple[int, ...]
    total: int
    pending: Any = None  # on its way to the device
    spare: tuple[Any, int] | None = None
    state: Any = None  # of the data set after it
    fault: Exception | None = None  # raised when the round is due
    lacking: int | None = None  # a process that has nothing to repeat


class _Pass:
    """One pass over a feed; every process asks for each round."""

    def __init__(
        self, feed: Feed, processes: "Processes", transfer: Transfer, pieces: Iterator[Piece]
    ) -> None:
        self._feed = feed
        self._processes = processes
        self._transfer = transfer
        self._pieces = pieces
        self._had_some = feed.has_spare

    def read(self) -> _Round:
        """Read the next round; no error is raised before all processes know of it."""
        fault: Exception | None = None
        piece = Piece(_FAILED)
        try:
            piece = next(self._pieces)
        except Exception as error:
            fault = error
        self._had_some = self._had_some or piece.count > 0 or piece.spare is not None
        word = piece.count if piece.count or self._had_some else _LACKS
        words = self._agree(word)
        if fault is None and _FAILED in words:
            rank = words.index(_FAILED)
            fault = DataError(
                f"Process {rank} could not read its next batch; its own report says why."
            )
            fault.origin = rank
        counts = tuple(max(word, 0) for word in words)
        pending = self._transfer.start(piece.data) if piece.count > 0 else None
        lacking = words.index(_LACKS) if _LACKS in words else None
        return _Round(counts, sum(counts), pending, piece.spare, piece.state, fault, lacking)

    def _agree(self, word: int) -> tuple[int, ...]:
        if self._processes.size == 1:
            return (word,)
        payload = word.to_bytes(_COUNT_BYTES, "little", signed=True)
        words = self._processes.all_gather_bytes(payload)
        return tuple(int.from_bytes(word, "little", signed=True) for word in words)


class AgreedLoader(PreparedLoader):
    """A prepared loader over a feed: streams, keys of whole batches, loaders of other kinds.

    Args:
        source: The loader of the user.
        feed: Where the rounds come from.
        context: What it is prepared for.
        batch_size: Samples of one process in a full round; None where that varies.
        whole: Whether the epoch ends before the first round that is not full.
        samples_per_epoch: Samples of an epoch, where known.
        batches_per_epoch: Rounds of an epoch, where known.
    """

    def __init__(
        self,
        source: Any,
        feed: Feed,
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
        self._feed = feed
        self.stream = feed.stream
        self._least = 1  # samples of a round that is not the end
        if whole and batch_size is not None:
            self._least = self.processes.size * batch_size
        self._transfer = transfer_for(self.device)
        self._refuse_empty(length_of(getattr(source, "dataset", source)))

    @override
    def windows(
        self, epoch: int, *, position: int = 0, accumulation: int = 1, drop_last: bool = False
    ) -> Generator[Window, None, None]:
        micro_batches = self._micro_batches(epoch, position, accumulation)
        found = 0
        with self._under_way(), closing(micro_batches):
            for window in self._cut(micro_batches, accumulation if drop_last else None):
                found += 1
                yield window
        if position == 0:
            self.found = 0, found, 0
            if not found:
                self._refuse_idle(epoch)
        if self.stream is not None:
            self.stream.ended()

    @override
    def batches(self, epoch: int, *, position: int = 0) -> Generator[MicroBatch, None, None]:
        with self._under_way(), closing(self._micro_batches(epoch, position, 1)) as micro_batches:
            yield from self._told(micro_batches)

    @override
    def order_digest(self, epoch: int, accumulation: int) -> str | None:
        return self._feed.order_digest(epoch)

    @override
    def forget_order(self) -> None:
        self._feed.forget_order()

    @override
    def close(self) -> None:
        self._feed.close()

    def _cut(self, micro_batches: Iterator[MicroBatch], full: int | None) -> Iterator[Window]:
        """Yield the windows; with `full`, not a last one of fewer micro-batches or samples."""
        if full is None:
            for first in micro_batches:
                parts = self._told(_window_of(first, micro_batches))
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
                yield Window(self._told(read), total, len(read))

    def _micro_batches(
        self, epoch: int, position: int, accumulation: int
    ) -> Generator[MicroBatch, None, None]:
        rank = self.processes.rank
        repeat = Repeat()
        for data, current, ahead in self._due(epoch, position, repeat, accumulation):
            count = current.counts[rank]
            last = ahead is None or self._is_end(ahead)
            size = count or repeat.size
            state = current.state
            yield MicroBatch(data, count, current.total, last, current.counts, size, state)

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

    def _told(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches, which may have been read ahead; each is under way from then on."""
        for micro_batch in micro_batches:
            if self.active is not None:
                self.active.yielded(self, micro_batch.counts, micro_batch.size)
            if self.stream is not None:
                self.stream.inside, self.stream.state = True, micro_batch.state
            yield micro_batch

    def _due(
        self, epoch: int, position: int, repeat: Repeat, accumulation: int
    ) -> Iterator[tuple[Any, _Round, _Round | None]]:
        """Yield what `_rounds` yields from `position` on, after the data of each round."""
        rank = self.processes.rank
        done, pieces = self._begin(epoch, position)
        for current, ahead in self._rounds(epoch, pieces, accumulation):
            data = None
            if current.counts[rank]:
                data = self._transfer.finish(current.pending)
                if ahead is None or not ahead.counts[rank]:
                    repeat.keep(data, current.counts[rank])
            if done < position:
                done += current.total
                if done > position:
                    break
                continue
            if not current.counts[rank]:
                data = self._repeated(repeat, epoch, current)
            yield data, current, ahead
        if done != position and position:
            raise DataError(
                f"The position is {position}, but no global batch starts there: one ends after "
                f"{done} samples. Keep the global batch and the data set of the checkpoint."
            )

    def _begin(self, epoch: int, position: int) -> tuple[int, Iterator[Piece]]:
        """Return how many samples were consumed where the pieces begin, and the pieces."""
        start = None
        if self.stream is not None:
            start, self.stream.start = self.stream.start, None
        if start is not None and start["state"] is not None:
            return position, self._feed.pieces(epoch, position, start)
        if position:
            logger.warning(
                "`%s` cannot jump to a position: the first %d samples of epoch %d are read again.",
                type(self.source).__name__,
                position,
                epoch,
            )
        done = position if self._feed.finds_position else 0
        return done, self._feed.pieces(epoch, done)

    def _rounds(
        self, epoch: int, pieces: Iterator[Piece], accumulation: int
    ) -> Iterator[tuple[_Round, _Round | None]]:
        """Yield each round of the epoch, and inside a window the one after it.

        What follows a window is read after its update, which a data set may depend on.
        """
        reading = _Pass(self._feed, self.processes, self._transfer, pieces)
        ahead, left = reading.read(), accumulation
        while not self._is_end(ahead):
            current = ahead
            if current.fault is not None:
                raise current.fault
            if current.lacking is not None:
                raise DataError(
                    f"Process {current.lacking} has no batch in epoch {epoch}, while others have, "
                    f"so it cannot take part in their collectives. {self._feed.advice}"
                )
            left = (left or accumulation) - 1
            following = reading.read() if left else None
            yield current, following
            ahead = reading.read() if following is None else following

    def _is_end(self, ahead: _Round) -> bool:
        is_end = ahead.fault is None and ahead.total < self._least
        if is_end and self.stream is not None:
            self.stream.end = ahead.state
        return is_end

    def _repeated(self, repeat: Repeat, epoch: int, current: _Round) -> Any:
        if not repeat.size:
            spare = self._feed.spare(epoch) if current.spare is None else current.spare
            data, size = spare
            repeat.keep(self._transfer.finish(self._transfer.start(data)), size)
        return repeat.take()


def _window_of(first: MicroBatch, following: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    yield first
    if first.last:
        return
    for micro_batch in following:
        yield micro_batch
        if micro_batch.last:
            return
