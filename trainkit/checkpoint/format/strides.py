"""The order in which the elements of a tensor lie in memory; no torch needed."""

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["check_strides", "is_dense", "kept", "row_major"]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie row by row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides give each element a place of its own, and leave none free.

    Nothing is at stake in dimensions of size 1. An empty tensor has no elements to place.
    """
    place = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if step != place and size != 1:
            return False
        place *= size
    return place > 0


def kept(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides that a checkpoint must keep; None where it reads row by row."""
    steps = zip(strides, row_major(shape), shape, strict=True)
    differs = any(step != plain and size != 1 for step, plain, size in steps)
    return tuple(strides) if differs and is_dense(shape, strides) else None


def check_strides(name: Any, shape: Sequence[int], strides: Any) -> None:
    """Check strides that were read from a file, of a tensor of that name.

    Raises:
        ValueError: They are not what `kept` returns: a tensor with them would show memory that
            is not its own, or one place twice.
    """
    numbers = type(strides) is list and all(type(s) is int and 0 <= s < 1 << 63 for s in strides)
    if not numbers or len(strides) != len(shape) or not is_dense(shape, strides):
        raise ValueError(
            f"`{name}` of shape {list(shape)} cannot have the strides {strides!r:.200}"
        )
