"""torch.compile, in place: the model keeps its class, its keys and, afterwards, its ways."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from trainkit.basics.device import has_graphs
from trainkit.basics.parsing import nearest
from trainkit.basics.torch_internals import call_module, compiled_call, set_compiled_call
from trainkit.errors import ConfigError

_WITH_GRAPHS = (
    "reduce-overhead",
    "max-autotune",
)  # modes that record graphs of a device


def compile_options(
    setting: Literal[True] | Mapping[str, Any], device: torch.device, *, accumulates: bool
) -> dict[str, Any]:
    """Return the options of torch.compile that were asked for.

    Args:
        accumulates: Whether a window has several micro-batches.
    """
    if setting is True:
        return {}
    if not isinstance(setting, Mapping):
        raise ConfigError(
            "`compile` must be True, False or a mapping with options of `torch.compile`, but is "
            f'{setting!r}. Write for example `compile={{"mode": "reduce-overhead"}}`.'
        )
    known = sorted(set(inspect.signature(torch.compile).parameters) - {"model"})
    for name in setting:
        if name not in known:
            raise ConfigError(
                f"`compile` has the option {name!r}, which `torch.compile` does not know."
                f"{nearest(str(name), known)} It takes {known}."
            )
    settings = setting.get("options") or {}
    graphs = setting.get("mode") in _WITH_GRAPHS or settings.get("triton.cudagraphs")
    if graphs and accumulates and has_graphs(device):
        raise ConfigError(
            f"Compiled with {dict(setting)!r}, torch replays graphs of the device, and these "
            "overwrite the gradients of earlier micro-batches of a window. Pass "
            "`gradient_accumulation_steps=1`, or no mode, or the mode "
            '"max-autotune-no-cudagraphs", which need no such graphs.'
        )
    return dict(setting)


@contextmanager
def compiled(module: nn.Module, options: Mapping[str, Any]) -> Iterator[None]:
    """Run `module` compiled inside the context, and as it was before after it.

    It is compiled in place, before a strategy wraps it: no key of a state dict changes, and
    DistributedDataParallel still splits the graph by its buckets. What was compiled stays in
    torch's cache, so that the next context with the same options compiles nothing again.
    """
    before = compiled_call(module)
    try:
        _compile(module, options)
    except Exception as error:  # torch has one class for each kind of bad option
        raise ConfigError(
            f"`torch.compile` refuses the options {dict(options)!r}: {error}"
        ) from error
    try:
        yield
    finally:
        set_compiled_call(module, before)


def _compile(module: nn.Module, options: Mapping[str, Any]) -> None:
    if not type(module).forward.__module__.startswith("torch.nn."):
        module.compile(**options)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_module(module, *args, **kwargs)

    # torch never starts to compile at functions of its own, such as `nn.Sequential.forward`.
    set_compiled_call(module, torch.compile(call, **options))
