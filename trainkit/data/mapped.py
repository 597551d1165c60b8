"""Loaders of map-style data sets: all counts are known from the order, without a collective."""

from collections.abc import Generator
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from trainkit.data.fetch import Recounted, counted, fetch_for
from trainkit.data.loader import EpochLength, LoaderContext, PreparedLoader
from trainkit.data.order import KeyedOrder, divide, length_of, set_epoch_on
from trainkit.data.plan import BatchPlan, FlatPlan, Plan
from trainkit.data.window import MicroBatch, PaddingBatch, Window
from trainkit.data.workers import datasets_of, fetcher_for


class MappedLoader(PreparedLoader):
    """A prepared loader over a map-style data set with a batch size or a batch sampler."""

    repeats_last = True  # a process without samples; False: the first batch, as after a resume

    def __init__(self, loader: DataLoader[Any], context: LoaderContext) -> None:
        super().__init__(loader, context)
        size = self.processes.size
        self.order = KeyedOrder(loader, context.seed)
        self._split = context.split_batches
        self._unit = 1
        batch_sampler: Any = loader.batch_sampler
        if not self.order.yields_batches:
            given = batch_sampler.batch_size
            self.batch_size = divide(given, size) if self._split else given
            if batch_sampler.drop_last:
                self._unit = self.batch_size * (size if self._trains else 1)
        fetch = fetch_for(loader, context)
        self._fetcher = fetcher_for(fetch, loader, context)
        self.rows_vary = fetch.rows_vary
        self._latest: tuple[int, Plan] | None = None  # the epoch under way in training
        self._is_ready = False  # whether no pass has used it
        length = length_of(self.order.sampler)
        if length is not None and self.batch_size is not None:
            self.samples_per_epoch = length - length % self._unit
            self.batches_per_epoch = -(-self.samples_per_epoch // (size * self.batch_size))
        elif length is not None:
            self.batches_per_epoch = length if self._split else -(-length // size)
        self._refuse_empty(length)

    @override
    def windows(
        self, epoch: int, *, position: int = 0, accumulation: int = 1, drop_last: bool = False
    ) -> Generator[Window, None, None]:
        plan = self._fresh_plan(epoch)
        self._is_ready = False
        first, length = plan.index_at(position), self._length(plan)
        stop = self._stop(plan, epoch, first, accumulation, drop_last)
        left, whole = (-(-length // accumulation) for length in (stop - first, stop))
        self._known_length = EpochLength(left, whole, plan.total(0, length))
        micro_batches = self.micro_batches(plan, epoch, first, stop, accumulation)
        try:
            for start in range(first, stop, accumulation):
                end = start + accumulation
                end = stop if end > stop else end
                parts = islice(micro_batches, end - start)
                yield Window(parts, plan.total(start, end), end - start)
                for _ in parts:  # what the caller left of the window
                    pass
        finally:
            micro_batches.close()

    def window_sizes(self, epoch: int, *, accumulation: int, drop_last: bool) -> list[int]:
        """Return the samples of each of the windows, over all processes, before they are read."""
        plan = self._fresh_plan(epoch)
        self._is_ready = True
        stop = self._stop(plan, epoch, 0, accumulation, drop_last)
        starts = range(0, stop, accumulation)
        return [plan.total(start, min(start + accumulation, stop)) for start in starts]

    @override
    def batches(self, epoch: int, *, position: int = 0) -> Generator[MicroBatch, None, None]:
        plan = self._plan(epoch)
        first = plan.index_at(position)
        length = self._length(plan)
        return self.micro_batches(plan, epoch, first, length, length)

    @override
    def close(self) -> None:
        self._fetcher.close()

    @override
    def order_facts(self) -> dict[str, Any]:
        seeds = self.order.seeds
        return super().order_facts() | ({"seeds of its generators": seeds} if seeds else {})

    @override
    def order_digest(self, epoch: int, accumulation: int) -> str | None:
        if self._latest is None or self._latest[0] != epoch:
            self._latest, self._is_ready = (epoch, self._plan(epoch)), True
        return self._latest[1].digest(accumulation)

    @override
    def forget_order(self) -> None:
        self._latest, self._is_ready = None, False

    @override
    def keep_order(self) -> None:
        self._is_ready = self._latest is not None

    def order_of(self, epoch: int, first: int, stop: int) -> list[Any]:
        """Return the indices in the data set at some positions of an epoch, for reports."""
        order = self.order.run(epoch)
        if self.batch_size is None:
            order = [index for batch in order for index in batch]
        return [index.item() if isinstance(index, Tensor) else index for index in order[first:stop]]

    def micro_batches(
        self, plan: Plan, epoch: int, first: int, stop: int, accumulation: int
    ) -> Generator[MicroBatch, None, None]:
        """Yield this process's micro-batches of the global batches `first` to `stop` of a plan."""
        rank, lacking, active = self.processes.rank, plan.lacking, self.active
        padding = PaddingBatch()
        until_last = accumulation
        if active is not None:
            active.began(self)
        fetched = self._fetcher.batches(epoch, partial(plan.tasks, first, stop))
        try:
            index = first
            for data in self._transfer.ahead(fetched):
                counts, total = plan.shares(index)
                count = size = counts[rank]
                index += 1
                until_last -= 1
                if index - 1 in lacking:
                    data = self._padding(padding, plan, epoch)
                    size = padding.size
                else:
                    if self.rows_vary:
                        size = plan.local_size(index - 1)
                        if type(data) is Recounted:
                            data, size = data
                            count = self._real_rows(plan, epoch, index - 1, size)
                    if index in lacking and self.repeats_last:
                        padding.keep(data, size)
                # Before it is handed out: whoever uses it asks for the batch under way.
                if active is not None:
                    active.yielded(self, counts, size, own=count if self.rows_vary else None)
                last = until_last == 0 or index == stop
                yield MicroBatch(data, count, total, last, counts, size)
                until_last = until_last or accumulation
        finally:
            if active is not None:
                active.ended(self)

    def _real_rows(self, plan: Plan, epoch: int, index: int, rows: int) -> int:
        """Return how many of the rows of a batch are of real samples, which come first."""
        real, asked = plan.shares(index)[0][self.processes.rank], plan.local_size(index)
        if rows == asked or real == 0:
            return real
        if real == asked:
            return rows
        (indices,) = plan.tasks(index, index + 1)  # the others fill up, by rows not known apart
        assert indices is not None
        return counted(self._fetcher.fetch(epoch, indices[:real]), real)[1]

    def _fresh_plan(self, epoch: int) -> Plan:
        """Return a plan of an epoch that no pass has used."""
        if not self._is_ready or self._latest is None or self._latest[0] != epoch:
            self._latest = epoch, self._plan(epoch)
        return self._latest[1]

    def _stop(self, plan: Plan, epoch: int, first: int, accumulation: int, drop_last: bool) -> int:
        """Return where the windows end that begin with a global batch."""
        stop = self._length(plan)
        if drop_last and stop > first:
            start = stop - ((stop - first) % accumulation or accumulation)
            nominal = self.nominal_window(accumulation)
            short = stop - start < accumulation
            if nominal is not None:
                short = plan.total(start, stop) < nominal
            stop = start if short else stop
        if stop == 0:
            self._refuse_idle(epoch)
        return stop

    def _length(self, plan: Plan) -> int:
        """Return how many global batches of a plan are used."""
        return plan.length if self.limit is None else min(plan.length, self.limit)

    def _padding(self, padding: PaddingBatch, plan: Plan, epoch: int) -> Any:
        if not padding.size:
            indices = plan.fallback_batch()
            fetched, size = counted(self._fetcher.fetch(epoch, indices), len(indices))
            padding.keep(self._transfer.finish(self._transfer.start(fetched)), size)
        return padding.take()

    def _plan(self, epoch: int) -> Plan:
        if self._trains:
            datasets = datasets_of(self.source.dataset)
            set_epoch_on([*self.order.samplers, *datasets], epoch)
        rank, size = self.processes.rank, self.processes.size
        order = self.order.run(epoch)
        if self.batch_size is None:
            batches = [list(batch) for batch in order]
            return BatchPlan(batches, rank=rank, size=size, split=self._split)
        order = order[: len(order) - len(order) % self._unit]
        return FlatPlan(order, batch_size=self.batch_size, rank=rank, size=size)
