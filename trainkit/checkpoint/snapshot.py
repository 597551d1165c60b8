"""A copy of a state that later updates do not reach."""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from trainkit.basics.device import can_pin, is_accelerator
from trainkit.basics.torch_internals import copy_each
from trainkit.checkpoint.format.codec import MOST_VALUES
from trainkit.checkpoint.format.tensor_file import row_major
from trainkit.checkpoint.format.tensors import kept_strides, refused_tensor
from trainkit.containers.json_form import DEEPEST

_SHALLOW = (set, frozenset, bytearray)  # what they hold cannot change


class Snapshot:
    """Copies states into buffers in main memory, which are kept for the next copy."""

    def __init__(self) -> None:
        self._last: Any = None

    def take(self, state: Any) -> Any:
        """Return a copy of `state`; the copy before it is overwritten.

        Tensors that are the same one stay so. What a checkpoint cannot hold is not copied: to
        refuse it, with its path, is up to the codec. Blocks until the copy is complete.
        """
        walk = _CopyPass()
        result = walk.copy(state, self._last, 0)
        late = False  # whether copies may arrive later
        if walk.sources:
            # One call for all: with many small tensors, calls take longer than copies.
            with torch.no_grad():
                late = bool(walk.devices) and all(map(is_accelerator, walk.devices))
                copy_each(walk.targets, walk.sources, non_blocking=late)
        self._last = None if walk.refused else result
        for device in walk.devices if late else ():
            torch.accelerator.synchronize(device)
        return result


class _CopyPass:
    """One pass through a state: finds a buffer for each tensor, and copies the rest."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.devices: set[torch.device] = set()  # of the sources, but for the CPU
        self.refused = False  # the copy has a tensor that is not a buffer
        self._first: dict[int, int] = {}  # address to the first place in `sources`
        self._more: dict[int, list[int]] = {}  # address to further ones: views, or empty tensors
        self._taken: set[int] = set()  # buffers; what was one tensor may be two now
        self._count = 0

    def copy(self, value: Any, last: Any, depth: int) -> Any:
        """Return a copy of any value; its tensors are filled later.

        Args:
            last: What stands at the same place of the copy before.
        """
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            return self._copy_tensor(value, last)
        self._count += 1
        if self._count > MOST_VALUES or depth > DEEPEST:
            return value  # lists that hold themselves, which the codec refuses
        if isinstance(value, dict):
            return self._copy_dict(value, last if isinstance(last, dict) else {}, depth + 1)
        if kind in (list, tuple, deque):
            old = last if type(last) is kind and len(last) == len(value) else [None] * len(value)
            copies = [self.copy(v, o, depth + 1) for v, o in zip(value, old, strict=True)]
            return deque(copies, value.maxlen) if kind is deque else kind(copies)
        if kind in _SHALLOW:
            return kind(value)
        is_array = (kind.__module__, kind.__name__) == ("numpy", "ndarray")
        return value.copy() if is_array else value

    def _copy_dict(self, value: dict[Any, Any], last: dict[Any, Any], depth: int) -> Any:
        items = {key: self.copy(item, last.get(key), depth) for key, item in value.items()}
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, items)
        if type(value) is OrderedDict or type(value) is Counter:
            return type(value)(items)
        return items if type(value) is dict else value

    def _copy_tensor(self, tensor: Tensor, last: Any) -> Tensor:
        if refused_tensor(tensor):
            self.refused = True
            return tensor
        number, address = len(self.sources), tensor.data_ptr()
        first = self._first.setdefault(address, number)
        if first != number:
            more = self._more.setdefault(address, [])
            for index in (first, *more):
                if tensor.numel() and _is_same(tensor, self.sources[index]):
                    return self.targets[index]
            more.append(number)
        buffer = self._buffer_for(tensor, last)
        self._taken.add(id(buffer))
        if not tensor.is_cpu:
            self.devices.add(tensor.device)
        self.sources.append(tensor)
        self.targets.append(buffer)
        return buffer

    def _buffer_for(self, tensor: Tensor, last: Any) -> Tensor:
        shape, dtype = tensor.shape, tensor.dtype
        strides = kept_strides(tensor) or row_major(shape)
        if (
            isinstance(last, Tensor)
            and (last.shape, last.dtype, last.stride()) == (shape, dtype, strides)
            and id(last) not in self._taken
        ):
            return last
        return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=can_pin(tensor.device))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors at one address are the same."""
    return (one.shape, one.stride(), one.dtype, one.device) == (
        other.shape,
        other.stride(),
        other.dtype,
        other.device,
    ) and (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg())
