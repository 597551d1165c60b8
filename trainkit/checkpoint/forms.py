"""What a value that came out of a file must be.

Digests find accidents. Forms find what was written by something else, or changed and signed again:
everything that a resume uses is compared with one before anything is applied.

A form is a type: `int` (a whole number from 0 on), `float` (any number), `str`, `bool`, `Any`,
`int | None`, or a class, such as `Tensor`. `[form]` is a list of what has that form, and a tuple of
forms a list of as many values. `{str: form}` is a dict by texts, and a dict of forms one that has
these keys, but perhaps not those that end in "?"; others are passed over, but not where the form is
an `Only`. A data class is a dict of its fields, which need not be there where they have defaults. A
function is a form too: it raises `Unfit`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

_MOST = 1 << 53


class Unfit(ValueError):
    """A value that is not what it must be.

    Args:
        why: What it must be and is, or what it lacks.
        keys: Where it stands, from the outside.
    """

    def __init__(self, why: str, *keys: Any) -> None:
        path = ".".join(map(str, keys))
        super().__init__(f"`{path}` {why}" if path else f"it {why}")
        self.why = why
        self.keys = keys


class Only(dict[Any, Any]):
    """A form of a dict that has no other keys."""


def check_form(value: Any, form: Any, *keys: Any) -> None:
    """Raise `Unfit` where a value is not of a form; `keys` say where it stands."""
    if type(form) is type and form in _PLAIN:  # most are
        _require(_PLAIN[form][1](value), _PLAIN[form][0], value, keys)
        return
    origin, inner = get_origin(form), get_args(form)
    if origin is list:
        form = [*inner]
    elif origin is dict:
        form = {inner[0]: inner[1]}
    if form is Any:
        return
    if isinstance(form, dict) and str in form:
        _require(isinstance(value, Mapping), "a dict", value, keys)
        for key, item in value.items():
            check_form(key, str, *keys)
            check_form(item, form[str], *keys, key)
    elif isinstance(form, dict):
        _fit_record(value, form, keys)
    elif is_dataclass(form):
        hints = get_type_hints(form, include_extras=True)
        optional = {f.name for f in fields(form) if f.default is not MISSING}
        _fit_record(value, {n + "?" * (n in optional): h for n, h in hints.items()}, keys)
    elif isinstance(form, list | tuple):
        _require(isinstance(value, list | tuple), "a list", value, keys)
        forms = form if isinstance(form, tuple) else form * len(value)
        if len(value) != len(forms):
            raise Unfit(f"must have {len(forms)} values, but has {len(value)}", *keys)
        for index, (item, one) in enumerate(zip(value, forms, strict=True)):
            check_form(item, one, *keys, index)
    elif origin is Annotated:
        check_form(value, form.__metadata__[0], *keys)
    elif origin in (Union, UnionType):
        if value is not None:
            check_form(value, inner[0], *keys)
    elif isinstance(form, type):
        _require(isinstance(value, form), f"a {form.__name__}".lower(), value, keys)
    else:
        try:
            form(value)
        except Unfit as error:
            raise Unfit(error.why, *keys, *error.keys) from None


def _fit_record(value: Any, form: Mapping[str, Any], keys: tuple[Any, ...]) -> None:
    _require(isinstance(value, Mapping), "a dict", value, keys)
    known = set()
    for name, inner in form.items():
        key = name.removesuffix("?") if type(name) is str else name
        known.add(key)
        if key in value:
            check_form(value[key], inner, *keys, key)
        elif key == name:
            raise Unfit(f"lacks the key {key!r}", *keys)
    extra = [key for key in value if key not in known] if isinstance(form, Only) else []
    if extra:
        raise Unfit(f"has the key {extra[0]!r}, which nothing knows", *keys)


def _require(holds: bool, what: str, value: Any, keys: tuple[Any, ...] = ()) -> None:
    if not holds:
        raise Unfit(f"must be {what}, but is {_shown(value)}", *keys)


def _is_number(value: Any) -> bool:
    """Return whether a value is a float, or a whole number that a float can hold."""
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number from 0 on", lambda v: type(v) is int and 0 <= v < _MOST),
    float: ("a number", _is_number),  # also NaN or infinite
    bool: ("true or false", lambda v: type(v) is bool),
    str: ("a text", lambda v: type(v) is str),
}


def finite(value: Any) -> None:
    """A number that is neither NaN nor infinite."""
    _require(_is_number(value) and math.isfinite(value), "a finite number", value)


def at_least(least: int) -> Callable[[Any], None]:
    """A whole number from `least` on."""

    def check(value: Any) -> None:
        _require(type(value) is int and value >= least, f"a whole number from {least} on", value)

    return check


def one_of(*texts: str) -> Callable[[Any], None]:
    """One of some texts."""
    return lambda value: _require(type(value) is str and value in texts, f"in {texts}", value)


def maybe(form: Any) -> Callable[[Any], None]:
    """None, or what `form` says; for forms that `|` does not take."""
    return lambda value: None if value is None else check_form(value, form)


def like(present: Any) -> Any:
    """The form of what stands in the place of `present`, whose keys it has: numbers for numbers.

    Where `present` is None nothing but a container of unknown form is refused.
    """
    if isinstance(present, Mapping):
        return {key: like(item) for key, item in present.items()}
    if isinstance(present, list | tuple):
        return tuple(map(like, present))
    if isinstance(present, bool | str):
        return type(present)
    if isinstance(present, int | float):
        return _scalar
    if hasattr(present, "dtype"):
        return tensor_like(present)
    return lambda value: _require(not isinstance(value, Mapping), "no dict", value)


def _scalar(value: Any) -> None:
    is_tensor = hasattr(value, "numel") and value.numel() == 1 and not value.dtype.is_complex
    _require(is_tensor or _is_number(value), "a number", value)


def tensor_like(present: Any) -> Callable[[Any], None]:
    """A tensor of the same shape and dtype; a number where it has one element."""

    def check(value: Any) -> None:
        is_tensor = hasattr(value, "dtype")
        same = is_tensor and (value.dtype, value.shape) == (present.dtype, present.shape)
        number = not is_tensor and present.numel() == 1 and _is_number(value)
        _require(same or number, _shown(present), value)

    return check


def _shown(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"a tensor of {value.dtype} with the shape {list(value.shape)}"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{type(value).__name__} {shown[:50]}..."
