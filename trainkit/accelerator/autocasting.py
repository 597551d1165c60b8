"""Forward passes under autocast or in float8, and how to get the user's module back."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.accelerator.settings import AutocastKwargs
from trainkit.containers.tree import map_leaves
from trainkit.export.state import COMPILED, unwrapped
from trainkit.precision.fp8 import FP8, restore


def autocast(device: str, dtype: torch.dtype, settings: AutocastKwargs) -> torch.autocast:
    """Return a context in which matrix products run in `dtype`, where that is enabled."""
    return torch.autocast(
        device, dtype=dtype, enabled=settings.enabled, cache_enabled=settings.cache_enabled
    )


class InnerFP8(FP8):
    """Converts all but the first and the last linear layer, unless the user chooses."""

    needs_layers = False  # of several models some may have none

    @override
    def layers(self, model: nn.Module) -> dict[str, nn.Linear]:
        linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
        ends = () if self.choose else (linear[:1] + linear[-1:])
        return {n: layer for n, layer in super().layers(model).items() if layer not in ends}


class InAutocast:
    """A forward under autocast."""

    def __init__(
        self, forward: Callable[..., Any], context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        update_wrapper(self, forward)
        self.forward = forward
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            outputs = self.forward(*args, **kwargs)
        return in_fp32(outputs)


def run_in_autocast(
    model: nn.Module, device: str, dtype: torch.dtype, settings: AutocastKwargs
) -> None:
    """Make every forward of `model` run under autocast and return tensors in fp32.

    The loss is then computed in fp32, outside of the model.
    """
    if not isinstance(model.__dict__.get("forward"), InAutocast):
        model.forward = InAutocast(model.forward, partial(autocast, device, dtype, settings))


def unwrap(
    model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Return the module inside of data parallelism.

    Args:
        keep_fp32_wrapper: Whether its forward still runs under autocast, and in float8.
        keep_torch_compile: Whether a model that `torch.compile` returned stays compiled.
    """
    model = unwrapped(model, keep_torch_compile=keep_torch_compile)
    if isinstance(wrapper := dict(model.named_children()).get(COMPILED), nn.Module):
        setattr(model, COMPILED, unwrap(wrapper, keep_fp32_wrapper=keep_fp32_wrapper))
    forward = model.__dict__.get("forward")
    if isinstance(forward, InAutocast) and not keep_fp32_wrapper:
        restore(model.modules())
        del model.forward
        own = getattr(forward.forward, "__func__", None)
        if getattr(model.forward, "__func__", None) is not own:
            model.forward = forward.forward  # it was the model's own attribute
    return model


def in_fp32(outputs: Any) -> Any:
    """Return a nesting with its half-precision tensors in fp32."""
    return map_leaves(outputs, _in_fp32)


def _in_fp32(leaf: Any) -> Any:
    is_half = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_half else leaf
