"""Forward passes under autocast, with outputs in fp32."""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerator.settings import AutocastKwargs
from trainkit.containers.tree import map_leaves

__all__ = ["autocast", "run_in_autocast", "run_plainly"]


def autocast(device: str, dtype: torch.dtype, settings: AutocastKwargs) -> torch.autocast:
    """Return a context in which matrix products run in `dtype`, where that is enabled."""
    return torch.autocast(
        device, dtype=dtype, enabled=settings.enabled, cache_enabled=settings.cache_enabled
    )


class _InAutocast:
    """A forward under autocast.

    Args:
        forward: The forward that it stands for.
        context: Makes the context that it runs in.
    """

    def __init__(self, forward: Callable[..., Any], context: Callable[[], torch.autocast]) -> None:
        update_wrapper(self, forward)
        self.forward = forward
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._context():
            outputs = self.forward(*args, **kwargs)
        return map_leaves(outputs, _in_fp32)


def run_in_autocast(
    model: nn.Module, device: str, dtype: torch.dtype, settings: AutocastKwargs
) -> None:
    """Make every forward of `model` run under autocast and return tensors in fp32.

    The loss is then computed in fp32, outside of the model.
    """
    if not isinstance(model.__dict__.get("forward"), _InAutocast):
        model.forward = _InAutocast(model.forward, partial(autocast, device, dtype, settings))


def run_plainly(model: nn.Module) -> None:
    """Take back what `run_in_autocast` did."""
    forward = model.__dict__.get("forward")
    if isinstance(forward, _InAutocast):
        del model.forward
        if getattr(model.forward, "__func__", None) is not getattr(
            forward.forward, "__func__", None
        ):
            model.forward = forward.forward  # it was the model's own attribute


def _in_fp32(leaf: Any) -> Any:
    is_half = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_half else leaf
