"""What `accelerate.hooks` has: objects that act before and after the forward of a module."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial, reduce, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.accelerate_compat.functions import (
    named_module_tensors,
    recursively_apply,
    set_module_tensor_to_device,
)
from trainkit.accelerator.operations import send_to_device
from trainkit.basics.device import default_kind, move_module
from trainkit.large_models.devices import Place, device_of

_HOOK, _FORWARD = "_hf_hook", "_old_forward"  # by which libraries know such modules


class ModelHook:
    """Acts around the forward of the module that `add_hook_to_module` gives it.

    Attributes:
        no_grad: Whether the forward itself runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Return the module as it is from now on."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that the forward gets, by place and by name."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return what the module returns."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Return the module as it is without the hook."""
        return module


class SequentialHook(ModelHook):
    """Several hooks; each of them gets what the one before it returned."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @override
    def init_hook(self, module: nn.Module) -> nn.Module:
        return reduce(lambda inner, hook: hook.init_hook(inner), self.hooks, module)

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return reduce(lambda inner, hook: hook.post_forward(module, inner), self.hooks, output)

    @override
    def detach_hook(self, module: nn.Module) -> nn.Module:
        return reduce(lambda inner, hook: hook.detach_hook(inner), self.hooks, module)


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Let a hook act around the forward of a module, and return that.

    Args:
        append: Act after the hook that is there, which else goes.
    """
    present = getattr(module, _HOOK, None)
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    if not hasattr(module, _FORWARD):
        setattr(module, _FORWARD, module.forward)
    module = hook.init_hook(module)
    setattr(module, _HOOK, hook)
    inner = getattr(module, _FORWARD)
    vars(module)["forward"] = update_wrapper(partial(_forward, module), inner)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the hook of a module away, with `recurse` those inside of it too, and return it."""
    if (hook := getattr(module, _HOOK, None)) is not None:
        hook.detach_hook(module)
        delattr(module, _HOOK)
    if (inner := vars(module).pop(_FORWARD, None)) is not None:
        del vars(module)["forward"]
        if getattr(inner, "__func__", None) is not type(module).forward:
            vars(module)["forward"] = inner
    for child in module.children() if recurse else ():
        remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks of a module and of all inside of it away."""
    remove_hook_from_module(module, recurse=True)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = getattr(module, _HOOK)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    with torch.no_grad() if hook.no_grad else nullcontext():
        output = getattr(module, _FORWARD)(*args, **kwargs)
    return hook.post_forward(module, output)


@dataclass(eq=False)
class AlignDevicesHook(ModelHook):
    """Brings inputs, and weights that are kept elsewhere, to where a module runs.

    Args:
        execution_device: Where it runs; None: inputs stay where they are.
        offload: Whether the module has its weights during its forward alone.
        io_same_device: Whether outputs go back to where the inputs were.
        weights_map: The weights of an `offload` by name; None: what the module has, on the host.
        offload_buffers: Whether buffers that are saved go with the weights.
        place_submodules: Whether tensors of the modules inside count.
        skip_keys: Keyword arguments, and entries of outputs, that stay where they are.
        tied_params_map: Without effect: a weight that is shared is brought for each module.
    """

    execution_device: Place | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | list[str] | None = None
    tied_params_map: Any = None
    input_device: torch.device | None = field(init=False, default=None)
    original_devices: dict[str, torch.device] = field(init=False, default_factory=dict)

    @override
    def init_hook(self, module: nn.Module) -> nn.Module:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        away = dict(self._offloaded(module)) if self.offload else {}
        if self.offload:
            self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
            if self.weights_map is None:
                self.weights_map = {name: tensor.to("cpu") for name, tensor in away.items()}
        for name in tensors if self.execution_device is not None else away:
            device = "meta" if name in away else self.execution_device
            set_module_tensor_to_device(module, name, device)
        return module

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.io_same_device:
            held: list[torch.device] = []
            recursively_apply(lambda tensor: held.append(tensor.device), (args, kwargs))
            self.input_device = held[0] if held else None
        for name, _ in self._offloaded(module) if self.offload else ():
            assert self.weights_map is not None
            to = "cpu" if self.execution_device is None else self.execution_device
            set_module_tensor_to_device(module, name, to, self.weights_map[name])
        device = self.execution_device
        return self._moved(args, device), self._moved(kwargs, device)

    @override
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for name, _ in [*self._offloaded(module)] if self.offload else ():
            set_module_tensor_to_device(module, name, "meta")
        return self._moved(output, self.input_device if self.io_same_device else None)

    @override
    def detach_hook(self, module: nn.Module) -> nn.Module:
        for name, device in self.original_devices.items():
            if device.type != "meta":
                value = (self.weights_map or {}).get(name)
                set_module_tensor_to_device(module, name, device, value)
        return module

    def _offloaded(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the module that come for its forward alone."""
        yield from named_module_tensors(
            module, self.offload_buffers, self.place_submodules, remove_non_persistent=True
        )

    def _moved(self, tree: Any, device: Place | None) -> Any:
        """Return a nesting on a device but for `skip_keys`; None: as it is."""
        if device is None:
            return tree
        if not (isinstance(tree, dict) and self.skip_keys):
            return send_to_device(tree, device)
        result = copy(tree)
        stays = [self.skip_keys] if isinstance(self.skip_keys, str) else self.skip_keys
        for name in tree.keys() - set(stays):
            result[name] = send_to_device(tree[name], device)
        return result


class CpuOffload(ModelHook):
    """Keeps a model on the host until it is called; then it stays on the device.

    Args:
        execution_device: Where it runs; None: the device of this process.
        prev_module_hook: Of the model that runs before, which goes back to the host.
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        prev_module_hook: "UserCpuOffloadHook | None" = None,
    ) -> None:
        device = default_kind() if execution_device is None else execution_device
        self.execution_device = device_of(device)
        self.prev_module_hook = prev_module_hook

    @override
    def init_hook(self, module: nn.Module) -> nn.Module:
        move_module(module, torch.device("cpu"))
        return module

    @override
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        move_module(module, self.execution_device)
        return send_to_device((args, kwargs), self.execution_device)  # type: ignore[no-any-return]


class UserCpuOffloadHook:
    """A model with its `CpuOffload`."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Put the model on the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Let the model stay where it is."""
        remove_hook_from_module(self.model)


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
    hook = CpuOffload(execution_device, prev_module_hook)
    return add_hook_to_module(model, hook, append=True), UserCpuOffloadHook(model, hook)
