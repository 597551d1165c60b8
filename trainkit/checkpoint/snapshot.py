"""A copy of a state that later updates do not reach."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

__all__ = ["Snapshot"]


class Snapshot:
    """Copies states into buffers in main memory, which are kept for the next copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, state: Any) -> Any:
        """Return a copy of `state`; the copy before it is overwritten.

        Tensors that are the same one stay so. Blocks until the copy is complete.
        """
        used: dict[tuple[Any, ...], Tensor] = {}
        seen: dict[tuple[Any, ...], Tensor] = {}
        result = self._copy(state, (), used, seen)
        self._buffers = used
        if any(tensor.is_pinned() for tensor in used.values()):
            torch.cuda.synchronize()
        return result

    def _copy(
        self,
        value: Any,
        path: tuple[Any, ...],
        used: dict[tuple[Any, ...], Tensor],
        seen: dict[tuple[Any, ...], Tensor],
    ) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value, path, used, seen)
        if isinstance(value, dict) and type(value) in (dict, OrderedDict):
            return {k: self._copy(v, (*path, k), used, seen) for k, v in value.items()}
        if type(value) is list or type(value) is tuple:
            return type(value)(self._copy(v, (*path, i), used, seen) for i, v in enumerate(value))
        return copy.deepcopy(value)

    def _copy_tensor(
        self,
        tensor: Tensor,
        path: tuple[Any, ...],
        used: dict[tuple[Any, ...], Tensor],
        seen: dict[tuple[Any, ...], Tensor],
    ) -> Tensor:
        tensor = tensor.detach()
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and identity in seen:
            return seen[identity]
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
            )
        buffer.copy_(tensor, non_blocking=True)
        used[path] = seen[identity] = buffer
        return buffer
