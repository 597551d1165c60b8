"""The tensors of a module under plain names, however it is wrapped, compiled or sharded."""

import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.basics.formatting import first_few
from trainkit.checkpoint.exact import empty_buffers
from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.errors import ConfigError

# Segments that wrappers put into names; no module of a user is called so.
COMPILED = "_orig_mod"
"""What `torch.compile` calls the module inside of what it returns."""
READ = "_trainkit_read"  # of a tensor on `meta` whose values are elsewhere: returns them
_WRAPPERS = frozenset({COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrapped(model: nn.Module, *, keep_torch_compile: bool = False) -> nn.Module:
    """Return the module behind torch's wrappers for data parallelism and compilation."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        # Not by `getattr`, which some modules pass on to what is inside of them.
        compiled = None if keep_torch_compile else dict(model.named_children()).get(COMPILED)
        inner = model.module if isinstance(model, parallel) else compiled
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    """Return the name of a tensor without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def shapes_of(module: nn.Module, saved: Iterable[str] = ()) -> dict[str, list[int] | None]:
    """Return each key of a module's state with the shape that it must have; None: any.

    Only parameters and buffers have one: what `get_extra_state` returns, or a list that a metric
    keeps, may have another length at each save, and need not be a tensor. Buffers that are None
    so far count where they are among the `saved` keys.
    """
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    state = module.state_dict(keep_vars=True)
    shapes = {name: list(v.shape) if id(v) in held else None for name, v in state.items()}
    return shapes | dict.fromkeys(empty_buffers(module).keys() & set(saved))


def shapes_in(
    saved: Mapping[str, Any], expected: Mapping[str, list[int] | None]
) -> dict[str, list[int] | str | None]:
    """Return the shapes in a saved state that are to be compared with those of `shapes_of`."""
    shapes: dict[str, list[int] | str | None] = dict.fromkeys(saved)
    for name, value in saved.items():
        if expected.get(name) is not None:
            shapes[name] = list(value.shape) if isinstance(value, Tensor) else "no tensor"
    return shapes


def tensors_of(model: nn.Module, state: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Return what a file of the model must hold: every tensor once, by its plain name.

    Of tied tensors the first counts, but not one that transformers fills from another. What is no
    tensor is left out with a warning.

    Args:
        state: What is written of it; None: its state.
    """
    module = unwrapped(model)
    state = module.state_dict(keep_vars=True) if state is None else state
    tensors = {plain_name(name): t for name, t in state.items()}
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    others = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    warn_of_others([name for name in others if name not in ignored])
    ignored.update(others)
    tensors = {name: value for name, value in tensors.items() if name not in ignored}
    empty = [name for name, value in tensors.items() if value.is_meta and not hasattr(value, READ)]
    if empty:
        raise ConfigError(
            f"{first_few(empty, 5)} of the model have no values: they are on the device `meta`. "
            "Fill the model first, for example by `load_checkpoint_in_model`."
        )
    filled = set(getattr(module, "_tied_weights_keys", None) or ())
    names: dict[Hashable, str] = {}
    for name in sorted(tensors, key=lambda name: name in filled):
        names.setdefault(same_memory(tensors[name]), name)
    kept = set(names.values())
    return {n: v if hasattr(v, READ) else v.detach() for n, v in tensors.items() if n in kept}


def warn_of_others(names: list[str], what: str = "not written") -> None:
    """Warn of entries of a model's state that files of weights cannot hold, if there are any."""
    if names:
        warnings.warn(
            f"{first_few(names, 5)} of the model's state hold no tensors, and are {what}: files of "
            "weights hold tensors alone. Only a checkpoint that is resumed from brings them back.",
            stacklevel=2,
        )


def same_memory(tensor: Tensor) -> Hashable:
    """Return a key that two tensors share where they are one: the same memory, seen equally."""
    local = getattr(tensor, "_local_tensor", tensor)
    if local.is_meta or local.layout is not torch.strided or not local.numel():
        return id(tensor)
    storage = local.untyped_storage().data_ptr()
    memory = (str(local.device), storage, local.storage_offset(), local.dtype)
    return (*memory, tuple(local.shape), local.stride(), tuple(tensor.shape))


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; of a sharded one every process must ask for it."""
    if hasattr(tensor, READ):
        return cast("Tensor", getattr(tensor, READ)())
    if not is_sharded(tensor):
        return tensor.detach()
    sharded: Any = tensor.detach()
    with torch.no_grad():
        if sharded.device.type != sharded.device_mesh.device_type:
            sharded = sharded.to(sharded.device_mesh.device_type)  # offloaded to the host
        full: Tensor = sharded.full_tensor()
    return full
