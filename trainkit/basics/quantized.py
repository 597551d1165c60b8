"""Weights in 4 or 8 bits, as bitsandbytes holds them: what a training and its checkpoints need."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from trainkit.errors import ConfigError

_held = WeakSet[nn.Module]()


def made_by(module: nn.Module) -> dict[str, str]:
    """Return, by the name of each weight in 4 or 8 bits, how it was made of the model's."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: words for name, weight in named if (words := _settings(weight))}


def with_scales(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of weights, and of what the state has beside those in 4 or 8 bits."""
    left = {*names}
    if small := left & made_by(module).keys():
        for key in map(".{}".format, module.state_dict()):
            owner = key.partition(".weight.")[0] if ".weight." in key else key.rpartition(".")[0]
            left |= {key[1:]} if f"{owner}.weight"[1:] in small else set()
    return left


def hold_quantized(model: nn.Module) -> None:
    """Let a model with weights in 4 bits keep them as they are, and load what its state holds.

    On some CPUs the library packs a weight anew in the first forward that is none of training. That
    rounds its scales, and no gradient passes such a weight, not even to other layers. And what
    `state_dict` returns of it `load_state_dict` refuses. Every face calls this with each model.
    """
    if "bitsandbytes" not in sys.modules:
        return
    for name, part in _in_4_bits(model):
        if getattr(part.weight.quant_state, "packing_format_for_cpu", False):
            raise ConfigError(
                f"`{name}` of the model was packed anew by a forward outside of a training: "
                "bitsandbytes does so on this CPU, rounds its scales by that, and then lets no "
                "gradient pass. Load the model once more, and give it to trainkit before you "
                "evaluate it."
            )
        part.support_avx512bf16_for_cpu = False
        if part not in _held:
            part.register_load_state_dict_pre_hook(_take_scales)
            _held.add(part)


def _in_4_bits(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in model.named_modules():
        if getattr(getattr(part, "weight", None), "quant_state", None) is not None:
            yield name, part


def _settings(weight: Any) -> str:
    if not type(weight).__module__.startswith("bitsandbytes."):
        return ""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return "" if getattr(weight, "has_fp16_weights", True) else "8 bits"
    nested = ", scales in 8 bits" if state.nested else ""
    return f"{state.quant_type} of {list(state.shape)}, {state.dtype}, by {state.blocksize}{nested}"


def _take_scales(part: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load the scales of a weight in 4 bits, of which its class knows only how to save them."""
    begin = f"{prefix}weight."
    saved = {key.removeprefix(begin): state.pop(key) for key in [*state] if key.startswith(begin)}
    if not saved:
        return
    device: torch.device = part.weight.device
    loaded = type(part.weight.quant_state).from_dict(saved, device=device)
    part.weight.quant_state = part.quant_state = loaded
