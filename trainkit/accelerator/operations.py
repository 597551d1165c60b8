"""The verbs as functions, for code that has no `Accelerator` at hand."""

import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerator.autocasting import unwrap
from trainkit.basics.rng import seed_host
from trainkit.containers.tree import map_leaves
from trainkit.distributed import Processes
from trainkit.distributed.communicator import Communicator
from trainkit.distributed.processes import Reduction
from trainkit.distributed.world import World


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch, on the CPU and on every accelerator.

    Args:
        seed: Equal on all processes.
        device_specific: Whether each process adds its number to the seed.
        deterministic: Whether torch may only use deterministic algorithms from now on.
    """
    with suppress(ModuleNotFoundError):
        import numpy  # noqa: F401  # else what imports it later would not be seeded
    if device_specific:
        seed += World.current().rank
    seed_host(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def gather(tensor: Any, differentiable: bool = False) -> Any:
    """Return the tensors of all processes, joined along dimension 0, on every process."""
    return Communicator().gather(tensor, differentiable)


def gather_object(object: Any) -> Any:
    """Return the items of the lists of all processes in one list, on every process."""
    return Communicator().gather_object(object)


def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Return the mean or the like of a tensor, or of each in a nesting, over all processes."""
    return Communicator().reduce(tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite a tensor, or each in a nesting, with that of one process, and return it."""
    return Communicator().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the items of a list with those of one process, and return it.

    Args:
        object_list: As long on all processes; of built-in types, tensors, arrays, data classes.
        from_process: Whose items count.
    """
    object_list[:] = Processes.start().broadcast_object(object_list, from_process)
    return object_list


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Return a tensor, or a nesting of them, made as long as the longest on any process."""
    if getattr(tensor, "is_nested", False):
        warnings.warn("Cannot pad nested tensors: this one stays as it is.", stacklevel=2)
        return tensor
    return Communicator().pad_across_processes(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return when all processes have called it."""
    Communicator().wait_for_everyone()


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Return one tensor, or nesting of tensors, with the rows of several of the same form.

    Raises:
        TypeError: There is something else, such as a text.
    """
    first: Any = data[0]
    new: Any = type(first)
    if len(data) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(data, dim)
    if isinstance(first, Mapping):
        joined = {key: concatenate([one[key] for one in data], dim) for key in first}
        return new(joined)
    if isinstance(first, list | tuple):
        rows = [concatenate(list(parts), dim) for parts in zip(*data, strict=True)]
        return new(*rows) if hasattr(first, "_fields") else new(rows)
    raise TypeError(f"`concatenate` joins tensors, but got a `{new.__name__}`. Take it out.")


def send_to_device(
    tensor: Any, device: torch.device | str | int, non_blocking: bool = False
) -> Any:
    """Return a nesting with everything that has a method `to` moved to the device.

    Copies to the CPU always block: they would be read before they have arrived.
    """
    late = non_blocking and torch.device(device).type != "cpu"
    return map_leaves(
        tensor, lambda leaf: leaf.to(device, non_blocking=late) if hasattr(leaf, "to") else leaf
    )


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the user's module; see `Accelerator.unwrap_model`."""
    return unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)
