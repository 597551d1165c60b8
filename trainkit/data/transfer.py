"""Brings batches to the device, one ahead of their use where there are streams (rule 18)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.basics.device import can_pin, has_streams
from trainkit.containers.tree import is_opaque, map_leaves


class Transfer:
    """Moves batches to a device; this one leaves them where they are."""

    def start(self, data: Any) -> Any:
        """Begin to move `data`; return what `finish` takes. Does not wait for the device."""
        return data

    def finish(self, pending: Any) -> Any:
        """Return the data of `start`, ready for the current stream."""
        return pending

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield `batches` on the device; the next is on its way while one is used.

        None stays None. An error of `batches` is raised when its batch is due.
        """
        pending, error = self._following(batches)
        while error is None:
            ready = None if pending is None else self.finish(pending)
            pending, error = self._following(batches)
            yield ready
        if not isinstance(error, StopIteration):
            raise error

    def _following(self, batches: Iterator[Any]) -> tuple[Any, Exception | None]:
        try:
            data = next(batches)
            return None if data is None else self.start(data), None
        except Exception as error:
            return None, error


class HostTransfer(Transfer):
    """Leaves batches where they are: on the CPU."""

    @override
    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches


class PlainTransfer(Transfer):
    """Moves batches when they are due."""

    def __init__(self, move: Callable[[Any], Any]) -> None:
        self._move = move

    @override
    def finish(self, pending: Any) -> Any:
        return map_leaves(pending, self._move)


@dataclass(slots=True)
class _Copies:
    """A batch on its way: its tree, the tensors on the device, and when they have arrived."""

    tree: Any = None
    tensors: list[Tensor] = field(default_factory=list)
    has_late: bool = False
    arrival: Any = None


class StreamTransfer(Transfer):
    """Copies from pinned memory on a stream of its own.

    Args:
        device: One with streams and pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    @override
    def start(self, data: Any) -> _Copies:
        copies = _Copies()

        def send(leaf: Any) -> Any:
            if _holds_others(leaf):
                copies.has_late = True
            elif isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                # A pinned source is kept by its allocator until the copy is done.
                leaf = leaf.pin_memory().to(self._device, non_blocking=True)
                copies.tensors.append(leaf)
            return leaf

        with self._stream:
            copies.tree = map_leaves(data, send)
            copies.arrival = self._stream.record_event()
        return copies

    @override
    def finish(self, pending: _Copies) -> Any:
        current = torch.accelerator.current_stream(self._device)
        current.wait_event(pending.arrival)
        for tensor in pending.tensors:
            tensor.record_stream(current)  # else its memory could be used again too early
        if pending.has_late:
            # What their `to` allocates is out of sight, so it must be on the current stream.
            return map_leaves(
                pending.tree, lambda leaf: leaf.to(self._device) if _holds_others(leaf) else leaf
            )
        return pending.tree


def transfer_for(device: torch.device, source: Any = None, *, moves: bool = True) -> Transfer:
    """Return the transfer that suits `device`.

    Args:
        source: A loader; its `pin_memory` says whether what does not move is pinned.
        moves: Whether batches move there; else whoever reads them copies them.
    """
    if device.type == "cpu" or not moves:
        pins = getattr(source, "pin_memory", False) and can_pin(device)
        return PlainTransfer(_pinned) if pins else HostTransfer()
    if has_streams(device) and can_pin(device):
        return StreamTransfer(device)
    return PlainTransfer(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf)


def _holds_others(leaf: Any) -> bool:
    """Return whether the tensors that a leaf is made of are out of sight: a graph, sparse rows."""
    return leaf.layout is not torch.strided if isinstance(leaf, Tensor) else is_opaque(leaf)


def _pinned(leaf: Any) -> Any:
    is_elsewhere = isinstance(leaf, Tensor) and leaf.device.type != "cpu"
    return leaf.pin_memory() if hasattr(leaf, "pin_memory") and not is_elsewhere else leaf
