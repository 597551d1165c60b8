"""JSON without surprises: no NaN, no duplicate keys, no other encoding than UTF-8."""

import json
import math
from typing import Any, NoReturn

LARGEST = 64 * 2**20  # bytes; also the limit of a manifest


def dump(value: Any, *, indent: int | None = None) -> bytes:
    """Return `value`, made of JSON's own types, as ASCII bytes.

    Raises:
        ValueError: There is a float that is not finite.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, allow_nan=False, separators=separators, indent=indent).encode("ascii")


def parse(data: bytes) -> Any:
    """Return the value that `data` holds.

    Raises:
        ValueError: It is not JSON in UTF-8, is too large or nested too deep, or has a duplicate
            key or a number that is not finite.
    """
    if len(data) > LARGEST:
        raise ValueError(f"it has {len(data)} bytes, more than the limit of {LARGEST}")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return unique


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"{token} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value
