"""Let blocks of a model compute their activations again in backward, instead of keeping them."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.device import forgets_random_state, get_rng_state, set_rng_state
from trainkit.errors import ConfigError
from trainkit.types import class_name

__all__ = ["checkpoint_activations"]


def checkpoint_activations(model: nn.Module, blocks: Collection[nn.Module]) -> Callable[[], None]:
    """Let a model compute its activations again in backward; return what undoes that.

    Neither names nor gradients change. Models of transformers do it by their own method, which
    also leaves out their caches: a second forward would fill them. What does so already is left
    alone.

    Args:
        model: The user's own, sharded or not.
        blocks: What is computed again one by one, where the model has no method of its own.

    Raises:
        ConfigError: There are no blocks.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        return _by_own_method(model)
    if not blocks:
        raise ConfigError(
            f"The activations of `{class_name(model)}` were to be computed again in backward, but "
            "it has no blocks that could be computed one by one: no list of modules of one class. "
            "Call `torch.utils.checkpoint.checkpoint` in its forward, or name the blocks by "
            "`FSDP(wrap_policy=..., activation_checkpointing=True)`."
        )
    plain: list[Any] = [b for b in blocks if getattr(b.forward, "func", None) is not checkpoint]
    before = [(block, vars(block).get("forward")) for block in plain]
    for block in plain:
        block.forward = partial(checkpoint, block.forward, **_options())

    def undo() -> None:
        for block, forward in before:
            del block.forward
            if forward is not None:
                block.forward = forward

    return undo


def _by_own_method(model: Any) -> Callable[[], None]:
    def own(name: str) -> Any:  # older versions of transformers say "gradient"
        newer = name.replace("gradient", "activation")
        return getattr(model, newer if hasattr(model, newer) else name)

    if own("is_gradient_checkpointing"):
        return lambda: None
    own("gradient_checkpointing_enable")(_options())

    def undo() -> None:
        own("gradient_checkpointing_disable")()
        model.disable_input_require_grads()

    return undo


def _options() -> dict[str, Any]:
    """Return how torch is to compute again."""
    own = {"context_fn": lambda: (nullcontext(), _Repeat())} if forgets_random_state() else {}
    return {"use_reentrant": False, **own}


class _Repeat:
    """Lets what runs inside draw the numbers that the device was to draw when this was made."""

    def __init__(self) -> None:
        kind: Any = torch.accelerator.current_accelerator()
        self._device = torch.device(kind.type, torch.accelerator.current_device_index())
        self._first = get_rng_state(self._device)

    def __enter__(self) -> None:
        self._present = get_rng_state(self._device)
        set_rng_state(self._first, self._device)

    def __exit__(self, *_: object) -> None:
        set_rng_state(self._present, self._device)
