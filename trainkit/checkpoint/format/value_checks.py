"""Checks of values that came out of a file: one table says of each key what it must hold."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

__all__ = [
    "Check",
    "Unfit",
    "anything",
    "between",
    "each",
    "finite",
    "flag",
    "like",
    "listed",
    "maybe",
    "must_be",
    "number",
    "one_of",
    "record",
    "row",
    "tensor",
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


def within(check: Check, value: Any, *keys: Any) -> None:
    """Check what stands under some keys, which an error names."""
    try:
        check(value)
    except Unfit as error:
        raise Unfit(error.why, *keys, *error.keys) from None


def must_be(what: str, holds: Callable[[Any], bool]) -> Check:
    """A value of which `holds` is true; `what` says in errors what that is."""

    def check(value: Any) -> None:
        if not holds(value):
            raise Unfit(f"must be {what}, but is {_shown(value)}")

    return check


def _is_number(value: Any) -> bool:
    """Return whether a value is a float, or a whole number that a float can hold."""
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


def anything(value: Any) -> None:
    """Whatever its owner makes of it."""


whole = must_be("a whole number from 0 on", lambda v: type(v) is int and 0 <= v < _MOST)
number = must_be("a number", _is_number)  # also NaN or infinite
finite = must_be("a finite number", lambda v: _is_number(v) and math.isfinite(v))
flag = must_be("true or false", lambda v: type(v) is bool)
text = must_be("a text", lambda v: type(v) is str)
tensor = must_be("a tensor", lambda v: isinstance(v, Tensor))
_mapping = must_be("a dict", lambda v: isinstance(v, Mapping))
_sequence = must_be("a list", lambda v: isinstance(v, list | tuple))


def between(low: float, high: float) -> Check:
    """A number between two others, and neither of them."""
    return must_be(f"between {low} and {high}", lambda v: _is_number(v) and low < v < high)


def one_of(*allowed: Any) -> Check:
    """One of some values."""
    return must_be(f"in {allowed}", lambda v: any(type(v) is type(a) and v == a for a in allowed))


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
        _mapping(value)
        for key, inner in table.items():
            if key in value:
                within(inner, value[key], key)
            elif key not in optional:
                raise Unfit(f"lacks the key {key!r}")
        extra = [key for key in value if key not in table]
        if closed and extra:
            raise Unfit(f"has the key {extra[0]!r}, which nothing knows")

    return check


def each(inner: Check) -> Check:
    """A dict from texts to what `inner` says."""

    def check(value: Any) -> None:
        _mapping(value)
        for key, item in value.items():
            text(key)
            within(inner, item, key)

    return check


def listed(inner: Check) -> Check:
    """A list, or a tuple, of what `inner` says."""

    def check(value: Any) -> None:
        _sequence(value)
        for index, item in enumerate(value):
            within(inner, item, index)

    return check


def row(*inner: Check) -> Check:
    """A list, or a tuple, of as many values, each of its own kind."""

    def check(value: Any) -> None:
        _sequence(value)
        if len(value) != len(inner):
            raise Unfit(f"must have {len(inner)} values, but has {len(value)}")
        for index, (one, item) in enumerate(zip(inner, value, strict=True)):
            within(one, item, index)

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
        return must_be("a number", _is_scalar)
    if isinstance(present, Tensor):
        return tensor_like(present)
    if isinstance(present, str):
        return text
    return must_be("no dict", lambda v: not isinstance(v, Mapping))


def tensor_like(present: Tensor) -> Check:
    """A tensor of the same shape and type; a number where it has one element."""
    dtype, shape = present.dtype, present.shape

    def holds(value: Any) -> bool:
        if isinstance(value, Tensor):
            return (value.dtype, value.shape) == (dtype, shape)
        return present.numel() == 1 and _is_number(value)

    return must_be(f"a tensor of {dtype} with the shape {list(shape)}", holds)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.dtype.is_complex
    return _is_number(value)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} with the shape {list(value.shape)}"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{type(value).__name__} {shown[:50]}..."
