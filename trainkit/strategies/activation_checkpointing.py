"""Let blocks of a model compute their activations again in backward, instead of keeping them."""

from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit.basics.device import forgets_random_state, get_rng_state, set_rng_state
from trainkit.basics.torch_internals import compiled_call, is_saved
from trainkit.errors import ConfigError
from trainkit.lazy import ask
from trainkit.types import class_name


def checkpoint_activations(
    model: nn.Module, blocks: Collection[nn.Module], method: bool | str = True
) -> Callable[[], None]:
    """Let a model compute its activations again in backward; return what undoes that.

    Neither names nor gradients nor buffers change. Models of transformers do it by their own
    method, which also leaves out their caches: a second forward would fill them. What does so
    already is left alone.

    Args:
        model: The user's own, sharded or not.
        blocks: What is computed again one by one, where the model has no method of its own.
        method: True, or another way, which `trainkit.large_models` knows.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        return _by_own_method(model, method)
    if not blocks:
        raise ConfigError(
            f"The activations of `{class_name(model)}` were to be computed again in backward, but "
            "it has no blocks that could be computed one by one: no list of modules of one class. "
            "Call `torch.utils.checkpoint.checkpoint` in its forward, or name the blocks by "
            "`FSDP(wrap_policy=..., activation_checkpointing=True)`."
        )
    plain: list[Any] = [
        b for b in blocks if "use_reentrant" not in getattr(b.forward, "keywords", ())
    ]
    before = [(block, vars(block).get("forward")) for block in plain]
    buffers = _Buffers(model)
    run, options = _way(buffers, method)
    for block in plain:
        block.forward = partial(run, buffers.in_block(block), **options)

    def undo() -> None:
        buffers.forget()
        for block, forward in before:
            del block.forward
            if forward is not None:
                block.forward = forward

    return undo


def _by_own_method(model: Any, method: bool | str) -> Callable[[], None]:
    def own(name: str) -> Any:  # older versions of transformers say "gradient"
        newer = name.replace("gradient", "activation")
        return getattr(model, newer if hasattr(model, newer) else name)

    if own("is_gradient_checkpointing"):
        return lambda: None
    buffers = _Buffers(model)
    run, options = _way(buffers, method)
    own("gradient_checkpointing_enable")(options)
    for part in model.modules():
        if run is not checkpoint and (name := "_gradient_checkpointing_func") in vars(part):
            vars(part)[name] = partial(run, **options)

    def undo() -> None:
        buffers.forget()
        own("gradient_checkpointing_disable")()
        with suppress(AttributeError):  # of transformers 4 where there is nothing to disable
            model.disable_input_require_grads()

    return undo


def _way(buffers: "_Buffers", method: bool | str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what computes again, such as torch's `checkpoint`, and its options."""

    def contexts() -> tuple[_First, _Again]:
        first = _First(buffers)
        return first, _Again(first)

    own = contexts if buffers.names or forgets_random_state() else None
    run, options = (checkpoint, own) if method is True else ask("recomputation")(method, own)
    return run, {"use_reentrant": False, **({} if options is None else {"context_fn": options})}


class _Buffers:
    """Knows which buffers a forward may change, and sees each call of the modules that have them.

    Batch norm would count its statistics twice, and spectral norm or a codebook be further on than
    in the first forward. What is not saved, such as masks, does not change; what is compiled
    is left to torch, which counts once, but starts again from the changed buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        is_compiled = any(compiled_call(part) is not None for part in model.modules())
        self.names = dict[nn.Module, list[str]]()
        for part in [] if is_compiled else model.modules():
            names = [name for name, _ in part.named_buffers(recurse=False) if is_saved(part, name)]
            if names:
                self.names[part] = names
        self.watching = list[Callable[[nn.Module], None]]()
        self._hooks = [  # before those of others: torch's older spectral norm works in one
            part.register_forward_pre_hook(self._seen, prepend=True) for part in self.names
        ]

    def _seen(self, module: nn.Module, *_: Any) -> None:
        for watch in self.watching:
            watch(module)

    def in_block(self, block: nn.Module) -> Callable[..., Any]:
        """Return the forward of a block, whose own hooks ran before it is computed again."""
        forward: Callable[..., Any] = block.forward
        if block not in self.names:
            return forward

        def seen(*args: Any, **kwargs: Any) -> Any:
            self._seen(block)
            return forward(*args, **kwargs)

        return seen

    def values(self, module: nn.Module) -> dict[str, Tensor]:
        return {name: getattr(module, name) for name in self.names[module]}

    def forget(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _First:
    """Notes what is in the buffers before each call of a module."""

    def __init__(self, buffers: _Buffers) -> None:
        self.buffers = buffers
        self.calls = list[dict[str, Tensor]]()

    def _watch(self, module: nn.Module) -> None:
        values = self.buffers.values(module)
        self.calls.append({name: value.detach().clone() for name, value in values.items()})

    def __enter__(self) -> None:
        self.buffers.watching.append(self._watch)

    def __exit__(self, *_: object) -> None:
        self.buffers.watching.remove(self._watch)


class _Again:
    """Lets each call find what it first found in its buffers, and puts these back at the end."""

    def __init__(self, first: _First) -> None:
        self._first = first
        self._repeat = _Repeat() if forgets_random_state() else nullcontext()

    def _watch(self, module: nn.Module) -> None:
        self._before.setdefault(module, self._first.buffers.values(module))
        for name, value in next(self._calls).items():
            setattr(module, name, value.clone())  # a tensor of its own, as others may be in a graph

    def __enter__(self) -> None:
        self._calls = iter(self._first.calls)
        self._before = dict[nn.Module, dict[str, Tensor]]()
        self._first.buffers.watching.append(self._watch)
        self._repeat.__enter__()

    def __exit__(self, *_: object) -> None:  # early, as soon as there is all that backward needs
        self._repeat.__exit__(*_)
        self._first.buffers.watching.remove(self._watch)
        for module, values in self._before.items():
            for name, value in values.items():
                setattr(module, name, value)


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
