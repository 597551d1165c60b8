"""The names of Accelerate for models larger than the memory of a device."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.basics.device import default_kind
from trainkit.export.loading import dtype_of, targets_of
from trainkit.large_models.devices import Place
from trainkit.large_models.dispatch import dispatch_model


def cpu_offload(
    model: nn.Module, execution_device: Place | None = None, **others: Any
) -> nn.Module:
    """Keep a model on the host; its modules visit the device when they run."""
    return dispatch_model(model, "cpu", _place(execution_device), **others)


def disk_offload(
    model: nn.Module, offload_dir: str | Path, execution_device: Place | None = None, **others: Any
) -> nn.Module:
    """Keep a model on the disk; its modules visit the device when they run."""
    main = _place(execution_device)
    return dispatch_model(model, "disk", main, offload_dir=offload_dir, **others)


def _place(given: Place | None) -> Place:
    return default_kind() if given is None else given


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Return the bytes of a number; a truth value counts as a bit."""
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, float]:
    """Return the bytes of each tensor, and of each module with all inside, by name ("": all).

    Args:
        dtype: Floating tensors count at most as this.
        special_dtypes: The same by name, which holds for tensors of any kind.
        buffers_only: Whether parameters are left out.
    """
    sizes: dict[str, float] = defaultdict(int)
    tensors = dict(model.named_buffers()) | ({} if buffers_only else dict(model.named_parameters()))
    most, special = dtype_of(dtype), special_dtypes or {}
    for name, tensor in tensors.items():
        each = dtype_byte_size(tensor.dtype)
        if name in special:
            each = dtype_byte_size(dtype_of(special[name]) or tensor.dtype)
        elif most is not None and (tensor.is_floating_point() or tensor.is_complex()):
            each = min(each, dtype_byte_size(most))
        parts = name.split(".")
        for count in range(len(parts) + 1):
            sizes[".".join(parts[:count])] += tensor.numel() * each
    return sizes


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    targets = {id(target): target for target in targets_of(model).values()}.values()
    named = (t.names for t in targets if isinstance(t.tensor, nn.Parameter))
    return [sorted(names) for names in named if len(names) > 1]
