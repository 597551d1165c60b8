"""What devices can do: the one module that knows kinds of them by name.

An accelerator is whatever torch can use as one: CUDA, ROCm (which torch calls CUDA), MPS, XPU and
those that a package adds, such as Ascend's `npu`. Everything else in trainkit asks here.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import nn

from trainkit.basics.torch_internals import extension_kind, moves_in_place, try_loss_scaling
from trainkit.errors import ConfigError

ASK_THE_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets torch ask what there is without CUDA, which then works in no process that is forked."""

_SHARED = "mps"  # its memory is the host's; it has one device, and names of its own for figures


def accelerator_kind() -> str | None:
    """Return the type of the accelerators of this machine, such as "cuda"; None without any."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def accelerator_count() -> int:
    """Return how many accelerators this machine shows."""
    return 0 if accelerator_kind() is None else torch.accelerator.device_count()


def default_kind() -> str:
    """Return the type of device that a process uses where nobody says one."""
    return accelerator_kind() or "cpu"


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is one of the accelerators that torch can use here."""
    return device.type == accelerator_kind()


def check_present(device: torch.device) -> None:
    """Raise if torch knows a device, but this machine does not have it."""
    kind, count = accelerator_kind(), accelerator_count()
    if device.type in ("cpu", "meta") or (device.type == kind and (device.index or 0) < count):
        return
    have = "no accelerator" if kind is None else f'{count} of type "{kind}"'
    nearest = "cpu" if kind is None else kind
    raise ConfigError(
        f'`device` is "{device}", but on this machine torch can use {have}. Pass '
        f'`device="{nearest}"` or leave it out; for another type, install a torch that has it.'
    )


def collective_backend(device: torch.device) -> str:
    """Return the name of the back end of `torch.distributed` that moves tensors of a device."""
    backend = torch.distributed.Backend.default_device_backend_map.get(device.type)
    if backend is not None and torch.distributed.is_backend_available(backend):
        return str(backend)
    if device.type in ("cpu", "cuda", _SHARED):
        return "gloo"  # builds without NCCL, as on Windows: slowly, through the host
    raise ConfigError(
        f"torch has no collectives for `{device.type}`, so several processes cannot train on it. "
        'Start one process, or pass `device="cpu"`.'
    )


def can_bind(device: torch.device) -> bool:
    """Return whether a process group can be bound to a device, beside a group of gloo."""
    # A group that is made later must serve the device too, and gloo serves few.
    served = torch.distributed.Backend.backend_capability["gloo"]
    return collective_backend(device) != "gloo" and device.type in served


@cache
def _works(kind: str, attempt: Callable[[torch.device], object]) -> bool:
    """Return whether a device of a kind can do something, by doing it once."""
    try:
        attempt(torch.device(kind))
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def has_graphs(device: torch.device) -> bool:
    """Return whether compiled code may be recorded on a device, and replayed in place."""
    return device.type == "cuda"


def has_streams(device: torch.device) -> bool:
    """Return whether copies can run on a stream of their own."""
    return device.type not in ("cpu", _SHARED) and _works(device.type, torch.Stream)


@cache  # `_works` would try each new lambda anew
def can_pin(device: torch.device) -> bool:
    """Return whether copies to and from a device gain by pinned memory."""
    return device.type not in ("cpu", "meta", _SHARED) and _works(
        device.type, lambda _: torch.empty(1, pin_memory=True)
    )


@cache
def wide_dtype(kind: str) -> torch.dtype:
    """Return the type of sums on a kind of device: float64, or float32 where there is none."""
    has_wide = _works(kind, lambda it: torch.zeros(1, dtype=torch.float64, device=it))
    return torch.float64 if has_wide else torch.float32


def has_loss_scaling(device: torch.device) -> bool:
    """Return whether `GradScaler` can work with gradients on a device."""
    return torch.amp.is_autocast_available(device.type) and _works(device.type, try_loss_scaling)


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module; its parameters stay the objects that optimizers hold and modules share."""
    future: Any = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    moves = is_accelerator(device) and any(p.device.type == "cpu" for p in module.parameters())
    future.set_swap_module_params_on_conversion(before or (moves and not moves_in_place(device)))
    try:
        return module.to(device)
    finally:
        future.set_swap_module_params_on_conversion(before)


def lacks_bf16(device: torch.device) -> bool:
    """Return whether a device says that it has no bfloat16."""
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return is_supported is not None and not is_supported()


def forbids_fork() -> bool:
    """Return whether the accelerator is in use, so that a forked process could not use it."""
    kind = accelerator_kind()
    is_initialized = getattr(kind and torch.get_device_module(kind), "is_initialized", None)
    return is_initialized is not None and is_initialized()


def forgets_random_state() -> bool:
    """Return whether torch computes activations again with other random numbers, as on MPS."""
    kind = accelerator_kind()
    # By which torch knows that a device may have drawn some.
    return kind is not None and not hasattr(torch.get_device_module(kind), "_initialized")


def generator_kinds() -> tuple[str, ...]:
    """Return the types of accelerators that this torch knows: each has random generators."""
    added = extension_kind()
    return ("cuda", "mps", "xpu", *(() if added == "privateuseone" else (added,)))


def siblings(device: torch.device) -> list[torch.device]:
    """Return all accelerators of the type of a device; none for the CPU."""
    count = 0 if device.type == "cpu" else torch.accelerator.device_count()
    return [torch.device(device.type, index) for index in range(count)]


def get_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator of an accelerator."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(*_place(device))
    return state


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    """Put back what `get_rng_state` returned."""
    torch.get_device_module(device).set_rng_state(state, *_place(device))


def memory_figures(device: torch.device) -> dict[str, int]:
    """Return the bytes "allocated", "reserved" and at their "peak", as far as they are known."""
    module = torch.get_device_module(device)
    if device.type == _SHARED:
        allocated, reserved = module.current_allocated_memory(), module.driver_allocated_memory()
        return {"allocated": allocated, "reserved": reserved}
    if not hasattr(module, "memory_allocated"):
        return {}
    return {
        "allocated": module.memory_allocated(device),
        "reserved": module.memory_reserved(device),
        "peak": module.max_memory_allocated(device),
    }


def free_memory(index: int) -> int:
    """Return the bytes that are free on an accelerator."""
    if accelerator_kind() == _SHARED:
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free: int = torch.get_device_module().mem_get_info(index)[0]
    return free


def utilization(device: torch.device) -> float | None:
    """Return the percentage of time in which a device was busy; None where nobody tells."""
    try:
        return float(torch.get_device_module(device).utilization(device))
    except Exception:  # the driver's library is missing, or has errors of its own
        return None


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == _SHARED else (device,)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which it keeps alive; needs no NumPy."""
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")
