"""How counts, sizes and values are written, for people and as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

__all__ = ["count", "json_value", "readable_size"]


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step`, `2,000 steps` or `2 micro-batches`."""
    ending = "es" if noun.endswith(("ss", "tch")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def readable_size(size: float) -> str:
    """Return a number of bytes for people, such as `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def json_value(value: Any) -> Any:
    """Return a value as strict JSON has it: tensors as numbers and lists, NaN as "NaN".

    Infinite numbers are "Infinity" and "-Infinity", which `float` reads; what JSON does not know
    is its text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    return value if isinstance(value, str | int | float | bool | None) else str(value)
