"""What the training loop gets from a loader: windows of micro-batches (rule 1)."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from trainkit.containers.tree import copy_containers


class MicroBatch:
    """What one forward of one process sees.

    Args:
        data: The batch, on the device.
        count: Rows of this process that count: its real samples, or what a collate function made
            of them; 0 for a zero-weight repeat (rule 16).
        total: Real samples over all processes, at least 1.
        last: Whether no further micro-batch follows in this window.
        counts: Real samples of each process, by rank.
        size: Rows of `data`: `count`, which is the default, or those of the repeat.
        state: Where an iterable data set is after it, if that has a state.
    """

    __slots__ = ("count", "counts", "data", "last", "size", "state", "total")
    by_loader: "Mapping[str, MicroBatch]" = MappingProxyType({})  # the share of each of several

    def __init__(
        self,
        data: Any,
        count: int,
        total: int,
        last: bool,
        counts: tuple[int, ...],
        size: int | None = None,
        state: Any = None,
    ) -> None:
        self.data = data
        self.count = count
        self.total = total
        self.last = last
        self.counts = counts
        self.size = count if size is None else size
        self.state = state


class Window:
    """The micro-batches of one step; iterate it once.

    Args:
        parts: The micro-batches, made as they are asked for.
        total: Real samples of the window over all processes; None where not known ahead.
        size: Number of micro-batches; None where not known ahead.
    """

    __slots__ = ("_parts", "size", "total")

    def __init__(
        self, parts: Iterator[MicroBatch], total: int | None = None, size: int | None = None
    ) -> None:
        self._parts = parts
        self.total = total
        self.size = size

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._parts

    def through(self, seen: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]) -> "Window":
        """Return this window; whoever iterates it gets what `seen` makes of its micro-batches."""
        self._parts = seen(self._parts)
        return self


class PaddingBatch:
    """A batch that is kept to be repeated with weight 0, by a process without samples (rule 16).

    What is done to one use does not reach the next: containers are copied, tensors are shared.
    """

    def __init__(self) -> None:
        self._data: Any = None
        self.size = 0  # samples of the batch; 0: none is kept

    def keep(self, data: Any, size: int) -> None:
        """Keep `data`, of `size` samples, before others may change it."""
        self._data = copy_containers(data)
        self.size = size

    def take(self) -> Any:
        return copy_containers(self._data)
