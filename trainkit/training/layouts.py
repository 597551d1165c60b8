"""How the parameters of a model lie in memory, and what to write where that has changed.

Kernels of torch choose their algorithm by it, so another order changes the last bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["layout_problems", "layouts"]

_MOST_SHOWN = 5
_FORMATS = {4: "channels_last", 5: "channels_last_3d"}  # by the number of dimensions


def layouts(module: nn.Module) -> dict[str, list[int]]:
    """Return the strides of the parameters that do not lie row by row."""
    return {
        name: list(parameter.stride())
        for name, parameter in module.named_parameters()
        if not parameter.is_contiguous()
    }


def layout_problems(
    saved: Mapping[str, Any], present: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Return, in words, which parameters lie otherwise than they did.

    Args:
        saved: What `layouts` returned.
        present: The same, of the run that resumes.
        shapes: Of all parameters, by name.
    """
    changed = [
        name
        for name, shape in shapes.items()
        if _order(saved.get(name), shape) != _order(present.get(name), shape)
    ]
    if not changed:
        return []
    shown = [
        f"`{name}` {_words(saved.get(name), shapes[name])} in the checkpoint, "
        f"{_words(present.get(name), shapes[name])} now"
        for name in changed[:_MOST_SHOWN]
    ]
    more = ", ..." if len(changed) > _MOST_SHOWN else ""
    return [
        f"{len(changed)} x parameter that lies otherwise in memory, which would change the last "
        f"bits: {', '.join(shown)}{more}. Before `fit`, write "
        f"`{_remedy(changed[0], saved, shapes)}`"
    ]


def _order(strides: Sequence[int] | None, shape: Sequence[int]) -> list[int]:
    """Return the strides that matter: those of dimensions with more than one entry."""
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    return [s for s, size in zip(strides, shape, strict=False) if size > 1]


def _has_format(strides: Sequence[int] | None, shape: Sequence[int]) -> bool:
    """Return whether strides are those of the `channels_last` of as many dimensions."""
    memory_format = getattr(torch, _FORMATS[len(shape)])
    like = torch.empty(shape, device="meta").to(memory_format=memory_format)
    return _order(strides, shape) == _order(like.stride(), shape)


def _words(strides: Sequence[int] | None, shape: Sequence[int]) -> str:
    if strides is None:
        return "row by row"
    if len(shape) in _FORMATS and _has_format(strides, shape):
        return f"in {_FORMATS[len(shape)]}"
    return f"with the strides {list(strides)}"


def _remedy(
    name: str, saved: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]
) -> str:
    shape, strides = shapes[name], saved.get(name)
    dims = len(shape)
    alike = {n: s for n, s in shapes.items() if len(s) == dims}
    if strides and dims in _FORMATS and all(_has_format(saved.get(n), s) for n, s in alike.items()):
        return f"model.to(memory_format=torch.{_FORMATS[dims]})"
    value = f"torch.empty_strided({tuple(shape)}, {tuple(strides)}).copy_(p)" if strides else ""
    return f'p = model.get_parameter("{name}"); p.data = {value or "p.data.contiguous()"}'
