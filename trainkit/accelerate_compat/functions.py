"""Small things that scripts import from `accelerate.utils` and `accelerate.test_utils`."""

import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerate_compat.availability import is_available
from trainkit.accelerator.autocasting import InAutocast, unwrap
from trainkit.accelerator.launcher import notebook_launcher, variables
from trainkit.basics.device import accelerator_count, accelerator_kind
from trainkit.basics.torch_internals import buffers_of, is_saved, parameters_of
from trainkit.containers.tree import map_children
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


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Return a model that is sharded and not noted as one to train, such as a reference model."""
    if not accelerator.is_fsdp2:
        raise ConfigError(
            "`fsdp2_prepare_model` shards a model as the `Accelerator` does, which does not. Pass "
            "`Accelerator(fsdp_plugin=...)`, or use `accelerator.prepare_model`."
        )
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of that name of a module or of one inside of it; None without one."""
    return next((type(each) for each in module.modules() if type(each).__name__ == name), None)


def get_parameters_from_modules(
    modules: str | Iterable[nn.Module] | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Return the parameters of modules; those that a pattern names move to the device."""
    selected: Iterable[nn.Module] = () if isinstance(modules, str) else modules or ()
    if isinstance(modules, str):
        named = model.named_modules()
        selected = [each.to(device) for name, each in named if re.fullmatch(modules, name)]
    return {parameter for module in selected for parameter in module.parameters()}


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
        tensor_name: Its name in `module`.
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


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is what `torch.compile` returned."""
    return hasattr(module, "_orig_mod")


class CustomDtype(Enum):
    """Formats of quantized weights that are no dtype of torch."""

    FP8, INT4, INT2 = "fp8", "int4", "int2"


class LoggerType(str, Enum):  # noqa: UP042  as `DistributedType`
    """The trackers of Accelerate that are here."""

    ALL, TENSORBOARD, WANDB, MLFLOW, TRACKIO = "all", "tensorboard", "wandb", "mlflow", "trackio"


# Files that states of Accelerate, and models of transformers, consist of.
MODEL_NAME, SAFE_MODEL_NAME = "pytorch_model", "model"
WEIGHTS_NAME, SAFE_WEIGHTS_NAME = "pytorch_model.bin", "model.safetensors"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
OPTIMIZER_NAME, SCHEDULER_NAME, SAMPLER_NAME = "optimizer", "scheduler", "sampler"
SCALER_NAME, RNG_STATE_NAME = "scaler.pt", "random_states"
PROFILE_PATTERN_NAME, FSDP_MODEL_NAME = "profile_{suffix}.json", "pytorch_model_fsdp"


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give back the memory that the device keeps free; first collect garbage, if asked."""
    if garbage_collection:
        gc.collect()
    if accelerator_kind() is not None:
        torch.get_device_module().empty_cache()


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names; its own alone, or those of its parts too."""
    yield from module.named_parameters(recurse=recurse)
    for name, buffer in module.named_buffers(recurse=recurse) if include_buffers else ():
        owner, _, key = name.rpartition(".")
        if not remove_non_persistent or is_saved(module.get_submodule(owner), key):
            yield name, buffer


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object on the main process, or on that of each machine, as `Accelerator.save`."""
    from trainkit.export.pickled import save as write

    world = World.current()
    if world.is_local_main if save_on_each_node else world.is_main:
        write(obj, f, safe_serialization=safe_serialization)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    """Run a function on several processes with the CPU alone; see `notebook_launcher`."""
    with patch_environment(accelerate_use_cpu="yes"):
        notebook_launcher(function, args, num_processes)


# The environment.


@contextmanager
def clear_environment() -> Iterator[None]:
    """Run the code inside without variables of the environment; it is then as before."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def patch_environment(**values: Any) -> AbstractContextManager[None]:
    """Run the code inside with these variables of the environment, in capitals."""
    return variables({name.upper(): str(value) for name, value in values.items()})


def str_to_bool(value: str) -> int:
    """Return 1 for "yes", "true", "on", "1" and the like, 0 for "no", "false", "off", "0"."""
    for answer, words in ((1, "y yes t true on 1"), (0, "n no f false off 0")):
        if value.lower() in words.split():
            return answer
    raise ConfigError(f"The value must be a word such as `yes`, `true`, `no`, but is `{value}`.")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable of the environment says yes."""
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the text of a variable of the environment."""
    return os.environ.get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of some variables of the environment that is a number from 0 on."""
    values = (int(os.environ.get(key, -1)) for key in env_keys)
    return next((value for value in values if value >= 0), default)


# Nestings.


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return a sequence, such as a named tuple, of the type of `obj`."""
    return type(obj)(*generator) if hasattr(obj, "_fields") else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = torch.is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return a nesting of tuples, lists and dicts with `func` of each tensor in its place.

    Args:
        func: Gets the tensor, `args` and `kwargs`.
        data: The nesting.
        *args: For `func`.
        test_type: Whether something is taken for a tensor.
        error_on_other_type: Whether there may be nothing else.
        **kwargs: For `func`.
    """

    def applied(part: Any) -> Any:
        if isinstance(part, tuple | list | Mapping):
            return map_children(part, applied)
        if test_type(part):
            return func(part, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"The nesting holds a `{type(part).__name__}`. Take it out.")
        return part

    return applied(data)


def listify(data: Any) -> Any:
    """Return a nesting with its tensors as lists of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def find_batch_size(data: Any) -> int:
    """Return the rows of the first tensor of a nesting."""
    while not isinstance(data, Tensor):
        if not isinstance(data, tuple | list | Mapping):
            raise TypeError(f"The batch size is that of tensors, but got `{type(data).__name__}`.")
        if not data:
            raise ConfigError(f"An empty {type(data).__name__} has no batch size. Leave it out.")
        data = next(iter(data.values() if isinstance(data, Mapping) else data))
    return data.shape[0]


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the entries of a dict, and of dicts in it, into another, and return that."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose half-precision outputs come in fp32."""
    return InAutocast(model_forward, nullcontext)
