"""Checks of values that came out of a file: one table says of each key what it must hold."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

__all__ = [
    "Check",
    "Unfit",
    "each",
    "finite",
    "flag",
    "like",
    "listed",
    "maybe",
    "number",
    "one_of",
    "positive",
    "record",
    "row",
    "tensor_like",
    "text",
    "whole",
    "within",
]

Check = Callable[[Any], None]
"""Raises `Unfit` for a value that is not what it must be."""

_MOST = 1 << 53


class Unfit(ValueError):
    """A value that is not what it must be.

    Args:
        why: What it must be and is, or what it lacks.
        keys: Where it stands, from the outside.
    """

    def __init__(self, why: str, *keys: Any) -> None:
        place = ".".join(map(str, keys))
        super().__init__(f"`{place}` {why}" if place else f"it {why}")
        self.why = why
        self.keys = keys


def within(key: Any, check: Check, value: Any) -> None:
    """Check what stands under a key; an error names the key."""
    try:
        check(value)
    except Unfit as error:
        raise Unfit(error.why, key, *error.keys) from None


def _must(holds: bool, what: str, value: Any) -> None:
    if not holds:
        raise Unfit(f"must be {what}, but is {_shown(value)}")


def whole(value: Any) -> None:
    """A whole number from 0 on."""
    _must(type(value) is int and 0 <= value < _MOST, "a whole number from 0 on", value)


def _is_number(value: Any) -> bool:
    """Return whether a value is a float, or a whole number that a float can hold."""
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


def number(value: Any) -> None:
    """A number, also NaN or infinite."""
    _must(_is_number(value), "a number", value)


def finite(value: Any) -> None:
    """A finite number."""
    _must(_is_number(value) and math.isfinite(value), "a finite number", value)


def positive(value: Any) -> None:
    """A finite number above 0."""
    finite(value)
    _must(value > 0, "above 0", value)


def flag(value: Any) -> None:
    """True or False."""
    _must(type(value) is bool, "true or false", value)


def text(value: Any) -> None:
    """A text."""
    _must(type(value) is str, "a text", value)


def one_of(*allowed: Any) -> Check:
    """One of some values."""

    def check(value: Any) -> None:
        _must(any(type(value) is type(a) and value == a for a in allowed), f"in {allowed}", value)

    return check


def maybe(inner: Check) -> Check:
    """None, or what `inner` says."""

    def check(value: Any) -> None:
        if value is not None:
            inner(value)

    return check


def record(
    table: Mapping[str, Check], *, optional: Collection[str] = (), closed: bool = False
) -> Check:
    """A dict with these keys; others are ignored unless `closed`."""

    def check(value: Any) -> None:
        _must(isinstance(value, Mapping), "a dict", value)
        for key, inner in table.items():
            if key in value:
                within(key, inner, value[key])
            elif key not in optional:
                raise Unfit(f"lacks the key {key!r}")
        extra = [key for key in value if key not in table]
        if closed and extra:
            raise Unfit(f"has the key {extra[0]!r}, which nothing knows")

    return check


def each(inner: Check) -> Check:
    """A dict from texts to what `inner` says."""

    def check(value: Any) -> None:
        _must(isinstance(value, Mapping), "a dict", value)
        for key, item in value.items():
            text(key)
            within(key, inner, item)

    return check


def listed(inner: Check) -> Check:
    """A list, or a tuple, of what `inner` says."""

    def check(value: Any) -> None:
        _must(isinstance(value, list | tuple), "a list", value)
        for index, item in enumerate(value):
            within(index, inner, item)

    return check


def row(*inner: Check) -> Check:
    """A tuple of as many values, each of its own kind."""

    def check(value: Any) -> None:
        is_row = isinstance(value, list | tuple) and len(value) == len(inner)
        _must(is_row, f"a row of {len(inner)} values", value)
        for index, (one, item) in enumerate(zip(inner, value, strict=True)):
            within(index, one, item)

    return check


def like(present: Any) -> Check:
    """What stands in the place of `present`, whose keys it has: numbers for numbers, and so on.

    Where `present` is None nothing but a container of unknown form is refused.
    """
    if isinstance(present, Mapping):
        return record({key: like(item) for key, item in present.items()})
    if isinstance(present, list | tuple):
        return row(*map(like, present))
    if isinstance(present, bool):
        return flag
    if isinstance(present, int | float):
        return _scalar
    if isinstance(present, Tensor):
        return tensor_like(present)
    if isinstance(present, str):
        return text
    return _anything


def tensor_like(present: Tensor) -> Check:
    """A tensor of the same shape and type; a number where it has one element."""

    def check(value: Any) -> None:
        if present.numel() == 1 and not isinstance(value, Tensor):
            _scalar(value)
            return
        wanted = f"a tensor of {present.dtype} with the shape {list(present.shape)}"
        same = isinstance(value, Tensor) and (value.dtype, value.shape) == (
            present.dtype,
            present.shape,
        )
        _must(same, wanted, value)

    return check


def _scalar(value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.dtype.is_complex:
        return
    number(value)


def _anything(value: Any) -> None:
    _must(not isinstance(value, Mapping), "no dict", value)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} with the shape {list(value.shape)}"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{type(value).__name__} {shown[:50]}..."
