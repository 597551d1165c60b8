"""A copy of a state that later updates do not reach."""

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.codec import DEEPEST, MOST_VALUES
from trainkit.checkpoint.tensors import refused_tensor

__all__ = ["Snapshot"]

_Path = tuple[Any, ...]
_SHALLOW = (set, frozenset, bytearray)  # what they hold cannot change


class Snapshot:
    """Copies states into buffers in main memory, which are kept for the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[_Path, Tensor] = {}

    def take(self, state: Any) -> Any:
        """Return a copy of `state`; the copy before it is overwritten.

        Tensors that are the same one stay so. What a checkpoint cannot hold is not copied: to
        refuse it, with its path, is up to the codec. Blocks until the copy is complete.
        """
        walk = _Walk(self._buffers)
        result = walk.copy(state, ())
        if walk.sources:
            # One call for all: with many small tensors, calls take longer than copies.
            with torch.no_grad():
                torch._foreach_copy_(walk.targets, walk.sources, non_blocking=True)
        self._buffers = walk.used
        if walk.on_cuda:
            torch.cuda.synchronize()
        return result


class _Walk:
    """One pass through a state: finds a buffer for each tensor, and copies the rest."""

    def __init__(self, buffers: dict[_Path, Tensor]) -> None:
        self.used: dict[_Path, Tensor] = {}
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.on_cuda = False
        self._buffers = buffers
        self._seen: dict[int, list[int]] = {}  # address to places in `sources`
        self._count = 0

    def copy(self, value: Any, path: _Path) -> Any:
        """Return a copy of any value; its tensors are filled later."""
        self._count += 1
        if self._count > MOST_VALUES or len(path) > DEEPEST:
            return value  # lists that hold themselves, which the codec refuses
        if isinstance(value, Tensor):
            return value if refused_tensor(value) else self._copy_tensor(value, path)
        if isinstance(value, dict):
            return self._copy_dict(value, path)
        if type(value) is list or type(value) is tuple:
            return type(value)([self.copy(item, (*path, i)) for i, item in enumerate(value)])
        if type(value) in _SHALLOW:
            return type(value)(value)
        kind = type(value)
        is_array = (kind.__module__, kind.__name__) == ("numpy", "ndarray")
        return value.copy() if is_array else value

    def _copy_dict(self, value: dict[Any, Any], path: _Path) -> Any:
        items = {key: self.copy(item, (*path, key)) for key, item in value.items()}
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, items)
        if type(value) is OrderedDict or type(value) is Counter:
            return type(value)(items)
        return items if type(value) is dict else value

    def _copy_tensor(self, tensor: Tensor, path: _Path) -> Tensor:
        alike = self._seen.setdefault(tensor.data_ptr(), [])
        for index in alike:
            if tensor.numel() and _is_same(tensor, self.sources[index]):
                return self.targets[index]
        alike.append(len(self.sources))
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pin = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        self.on_cuda |= tensor.is_cuda
        self.sources.append(tensor)
        self.targets.append(buffer)
        self.used[path] = buffer
        return buffer


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors at one address are the same."""
    return (one.shape, one.stride(), one.dtype, one.device) == (
        other.shape,
        other.stride(),
        other.dtype,
        other.device,
    ) and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
