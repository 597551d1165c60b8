"""Small things that scripts import from `accelerate.utils` and `accelerate.test_utils`."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerate_compat.availability import is_available
from trainkit.accelerator.autocasting import unwrap
from trainkit.basics.device import accelerator_count, accelerator_kind
from trainkit.basics.torch_internals import buffers_of, parameters_of
from trainkit.distributed.world import World
from trainkit.errors import ConfigError


def get_backend() -> tuple[str, int, Callable[..., int]]:
    """Return the type of this machine's devices, how many, and what counts their memory."""
    kind = accelerator_kind()
    if kind is None:
        return "cpu", 1, int  # it returns 0
    module: Any = torch.get_device_module(kind)
    count = getattr(module, "memory_allocated", None) or module.current_allocated_memory
    return kind, accelerator_count(), count


torch_device = get_backend()[0]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of `tqdm`, which only the main process of each machine shows."""
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"`tqdm` takes what is to be counted first, but got {args[0]}. Pass "
            f"`main_process_only={args[0]}` by name."
        )
    hidden = main_process_only and not World.current().is_local_main
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable", False) or hidden})


def on_main_process(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of a tracker run on the main process alone, unless it tracks on all of them."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        only_main = getattr(self, "main_process_only", False)
        return method(self, *args, **kwargs) if World.current().is_main or not only_main else None

    return run


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, prepared or not, is one of `peft`."""
    if not is_available("peft"):
        return False
    return isinstance(unwrap(model), import_module("peft").PeftModel)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> None:
    """Move a parameter or buffer such as "layer.0.weight" to a device, and give it a value.

    Args:
        module: The model.
        tensor_name: Its name there.
        device: Where it goes.
        value: Of the same shape; needed where the old one is on the meta device.
        dtype: Of `value` from then on, but for whole numbers; None: that of the old one.
        **others: Names that Accelerate has, which make no difference to the values.
    """
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path)
    old = parameters_of(owner).get(name, buffers_of(owner).get(name))
    if old is None:
        raise ConfigError(f"`{type(module).__name__}` has no parameter or buffer `{tensor_name}`.")
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ConfigError(f"`{tensor_name}` is on the meta device. Pass its `value`.")
    if value is not None and value.shape != old.shape:
        raise ConfigError(
            f"`value` has the shape {tuple(value.shape)}, but `{tensor_name}` has "
            f"{tuple(old.shape)}."
        )
    if value is None:
        new = old.detach().to(device)
        if new.device == old.device:
            return  # an optimizer may hold it
    else:
        cast = dtype is None or value.is_floating_point()
        new = value.detach().to(device, (dtype or old.dtype) if cast else value.dtype)
    if isinstance(old, nn.Parameter):
        parameters_of(owner)[name] = nn.Parameter(new, requires_grad=old.requires_grad)
    else:
        buffers_of(owner)[name] = new
