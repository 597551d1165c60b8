"""Data that process 0 reads and sends to the others, in a loop of the user's own."""

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from typing_extensions import override

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.loader import SharedLoader, Sharing, State
from trainkit.accelerator.mapped import MappedShare
from trainkit.accelerator.settings import GradientAccumulationPlugin
from trainkit.accelerator.streamed import StreamedShare
from trainkit.containers.sample_rows import Merge, Node, Origin, cut, parse
from trainkit.containers.tree import count_samples
from trainkit.data import MicroBatch
from trainkit.data.order import divide
from trainkit.data.order_facts import changed_facts, digest_of
from trainkit.data.transfer import transfer_for
from trainkit.distributed import only_this_process, run_on_main
from trainkit.distributed.active_batches import ActiveLoaders


def for_process_0(sharing: Sharing) -> Sharing:
    """Return how process 0 reads all the data, as if it were alone."""
    active = ActiveLoaders()
    return replace(
        sharing,
        processes=only_this_process(sharing.processes),
        device=torch.device("cpu"),
        configuration=replace(sharing.configuration, split_batches=False),
        active=active,
        accumulation=Accumulation(GradientAccumulationPlugin(), active),
    )


class DispatchedShare(SharedLoader):
    """A loader that only process 0 reads, in the order that one process has.

    As in Accelerate a global batch is as many batches of the loader as there are processes, or
    one with `split_batches`; each process gets an equal slice, and the first rows of the pass
    complete what cannot be divided. A later begin reads what it leaves out.

    Args:
        reader: The loader as process 0 reads it alone; the others only ask it for its length.
    """

    def __init__(self, reader: SharedLoader, sharing: Sharing) -> None:
        super().__init__(reader, sharing)
        self._rank, self._size = sharing.processes.rank, sharing.processes.size
        self._together = 1 if sharing.configuration.split_batches else self._size
        self._drop_last = bool(getattr(self.source, "drop_last", False))
        self._transfer = transfer_for(sharing.device, self.source, moves=sharing.moves)
        self._known: dict[str, type] = {}
        if isinstance(reader, StreamedShare):
            reader.draws_of_torch = False  # every process does
        self._stream: Any = None  # where an iterable data set was when the pass began
        given = getattr(self.source, "batch_size", None)
        if given is not None:
            self.full_size = given if self._together > 1 else divide(given, self._size)

    @override
    def __len__(self) -> int:
        batches = len(self._inner)
        return batches // self._together if self._drop_last else -(-batches // self._together)

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._inner.set_epoch(epoch)

    @override
    def order_facts(self) -> dict[str, Any]:
        own = {"samples of a global batch": self.full_size and self.full_size * self._size}
        return {**self._inner.order_facts(), **own}

    @override
    def _order_digest(self) -> str | None:
        return None if self._order is None else digest_of(self._inner._drawn)

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {**self._inner.state_dict(), **super().state_dict()}
        if "stream" in state and self._position and not self._has_ended:
            state["stream"] = self._stream
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        reads_again = "stream" in state_dict and not state_dict["has_ended"]
        self._inner.load_state_dict(state_dict | ({"batches": 0} if reads_again else {}))

    @override
    def loses_place(self, state_dict: dict[str, Any]) -> str:
        return "; ".join(changed_facts(state_dict.get("facts", {}), self.order_facts()))

    @override
    def _batches(self, skip: int, resumption: State | None) -> Iterator[MicroBatch]:
        try:
            self._length = len(self)
        except TypeError:
            self._length = None
        self._stream = self._inner.state_dict().get("stream")
        self._inner.set_epoch(self.epoch)  # it may have read on when a pass was left
        if resumption is None and (self._rank > 0 or not isinstance(self._inner, MappedShare)):
            torch.empty((), dtype=torch.int64).random_()  # as the sampler does on process 0
        with closing(self._global_batches(skip)) as reading:  # which only process 0 begins
            while True:
                sent = run_on_main(self._sharing.processes, lambda: next(reading, None))
                if sent is None:
                    return
                yield self._share(*sent)
                if sent[2]:
                    return

    def _share(self, node: Node, total: int, last: bool) -> MicroBatch:
        """Return the slice of this process in a global batch.

        Args:
            node: The whole, with what completes it.
            total: Its real samples.
        """
        share = -(-total // self._size)
        start = self._rank * share
        mine = self._merged([cut(node, start + share, start)])
        counts = tuple(min(max(total - r * share, 0), share) for r in range(self._size))
        data = self._transfer.finish(self._transfer.start(mine))
        return MicroBatch(data, counts[self._rank], total, last, counts, share)

    def _global_batches(self, skip: int) -> Generator[tuple[Node, int, bool], None, None]:
        """Yield the global batches of a pass from number `skip` on; process 0 reads them."""
        with closing(self._inner.iterate(0)) as reading:
            first = ahead = self._read(reading)
            self._order = self._inner._order  # before the reader comes to its end
            index = 0
            while ahead is not None:
                (node, total), ahead = ahead, self._read(reading)
                if index >= skip:
                    assert first is not None
                    yield self._completed(node, total, *first), total, ahead is None
                index += 1

    def _read(self, reading: Iterator[Any]) -> tuple[Node, int] | None:
        """Return the next global batch and its samples; None at the end."""
        parts = list(islice(reading, self._together))
        if not parts or (self._drop_last and len(parts) < self._together):
            return None
        sizes = [count_samples(part) for part in parts]
        nodes = [self._node(part, size) for part, size in zip(parts, sizes, strict=True)]
        return self._node(self._merged(nodes), sum(sizes)), sum(sizes)

    def _completed(self, node: Node, total: int, first: Node, rows: int) -> Node:
        """Return a global batch that all processes can have equal slices of."""
        missing = -total % self._size
        if not missing:
            return node
        filling = [cut(first, min(rows, missing - done)) for done in range(0, missing, rows)]
        return self._node(self._merged([node, *filling]), total + missing)

    def _node(self, value: Any, size: int) -> Node:
        return parse(value, size, "batch", self._known)

    def _merged(self, nodes: list[Node]) -> Any:
        merge = Merge(self._known, pads=False)
        return merge(nodes, [Origin(0, index) for index in range(len(nodes))], "batch")
