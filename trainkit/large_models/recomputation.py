"""Other ways to compute again in backward: from inputs on the host, or all but what is dear."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainkit.basics.device import can_pin, default_kind
from trainkit.basics.torch_internals import dear_operators
from trainkit.errors import ConfigError

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes what the forward of a block runs in, and what it runs in again."""


def recomputation(
    method: str, contexts: Contexts | None
) -> tuple[Callable[..., Any], Contexts | None]:
    """Return what takes the place of torch's `checkpoint`, and its `context_fn`.

    Args:
        method: "offload": the inputs of a block wait in the memory of the host. "selective": the
            results of matrix products, convolutions and attention are kept, and all that is cheap
            is computed again.
        contexts: What blocks are to run in besides.
    """
    if method == "offload":
        return _checkpoint_offloaded, contexts
    if method != "selective":
        raise ConfigError(
            "Activations can be kept (False), computed again (True), computed again but for what "
            'is dear ("selective"), or from inputs on the host ("offload"); given was '
            f"{method!r}."
        )
    kept: Contexts = partial(create_selective_checkpoint_contexts, dear_operators())
    if contexts is None:
        return checkpoint, kept

    def both() -> tuple[_Together, _Together]:
        first, again = zip(contexts(), kept(), strict=True)
        return _Together(first), _Together(again)

    return checkpoint, both


def _checkpoint_offloaded(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    # Torch's own hooks are inside of these, and take all but the inputs.
    kind = default_kind()
    with save_on_cpu(pin_memory=can_pin(torch.device(kind)), device_type=kind):
        return checkpoint(function, *inputs, **options)


class _Together:
    """Several contexts in one, which may be entered again, as a second backward does."""

    def __init__(self, contexts: tuple[AbstractContextManager[Any], ...]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
