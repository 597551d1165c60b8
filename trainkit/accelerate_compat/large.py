"""The names of Accelerate for models larger than the memory of a device."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainkit.basics.device import default_kind, move_module
from trainkit.export.loading import dtype_of, targets_of
from trainkit.large_models.devices import Place, device_of
from trainkit.large_models.dispatch import dispatch_model
from trainkit.large_models.offload import moved


def cpu_offload(
    model: nn.Module, execution_device: Place | None = None, **others: Any
) -> nn.Module:
    """Keep a model on the host; its modules visit the device when they run."""
    return dispatch_model(model, "cpu", execution_device or default_kind(), **others)


def disk_offload(
    model: nn.Module, offload_dir: str | Path, execution_device: Place | None = None, **others: Any
) -> nn.Module:
    """Keep a model on the disk; its modules visit the device when they run."""
    main = execution_device or default_kind()
    return dispatch_model(model, "disk", main, offload_dir=offload_dir, **others)


class UserCpuOffloadHook:
    """Brings a whole model to a device when it is called, and back when it is told.

    Args:
        model: On the host until its next call.
        previous: Of another model, which goes back to the host first.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, previous: "UserCpuOffloadHook | None"
    ) -> None:
        self.model, self._device, self._previous = model, device, previous
        self._handle = model.register_forward_pre_hook(self._bring, with_kwargs=True)
        self.offload()

    def offload(self) -> None:
        """Put the model on the host."""
        move_module(self.model, torch.device("cpu"))

    def remove(self) -> None:
        """Let the model stay where it is."""
        self._handle.remove()

    def _bring(self, model: nn.Module, inputs: Any, options: Any) -> Any:
        if self._previous is not None:
            self._previous.offload()
        move_module(model, self._device)
        return moved((inputs, options), self._device)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Place | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Return a model that stays on the device after a call until its hook is told `offload`.

    Args:
        execution_device: Where it runs; None: the device of this process.
        prev_module_hook: That of the model that runs before.
    """
    device = device_of(execution_device or default_kind())
    return model, UserCpuOffloadHook(model, device, prev_module_hook)


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
