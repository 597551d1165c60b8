"""The names of Accelerate for models larger than the memory of a device."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.basics.device import default_kind
from trainkit.export.loading import dtype_of, targets_of
from trainkit.large_models.devices import Place, room
from trainkit.large_models.dispatch import dispatch_model
from trainkit.types import Size


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


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, Size] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return a `max_memory` by which `infer_auto_device_map` gives each GPU about as much.

    Args:
        model: Whose tensors are shared out; may be on the meta device.
        max_memory: What each place has at most; None: what is free there.
        no_split_module_classes: Names of classes whose modules stay on one device.
        dtype: As of `compute_module_sizes`.
        special_dtypes: The same.
        low_zero: Whether the first GPU gets only what the others have no room for.
    """
    free = room(max_memory)
    gpus = sorted(device for device, size in free.items() if isinstance(device, int) and size)
    if not gpus:
        return free
    low_zero = low_zero and len(gpus) > 1
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    given = no_split_module_classes
    unsplit = frozenset([given] if isinstance(given, str) else given or ())
    blocks: dict[str, float] = {}
    for name, module in model.named_modules():
        if type(module).__name__ in unsplit and name in sizes and name:
            blocks.setdefault(type(module).__name__, sizes[name])
    tensors = _last(sizes)
    layers = _last([name for name in sizes if name not in tensors])
    mean = sum(sizes[name] for name in layers) // max(1, len(layers))
    # A GPU ends before the layer that does not fit, so each has room for one more than its share.
    share = int(sizes[""] // (len(gpus) - low_zero)) + int(1.25 * max(mean, *blocks.values(), 0))
    for gpu in gpus[:-1]:
        if gpu or not low_zero:
            free[gpu] = min(share, free[gpu])
    if low_zero and 0 in gpus:
        left = int(sizes[""]) - sum(free[gpu] for gpu in gpus if gpu)
        free[0] = min(max(0, left), free[0])
    return free


def _last(names: Iterable[str]) -> set[str]:
    """Return the names with none below them."""
    return {*names} - {name.rpartition(".")[0] for name in names} - {""}


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    targets = {id(target): target for target in targets_of(model).values()}.values()
    named = (t.names for t in targets if isinstance(t.tensor, nn.Parameter))
    return [sorted(names) for names in named if len(names) > 1]
