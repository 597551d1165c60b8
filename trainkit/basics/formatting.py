"""How counts, sizes, times and values are written, for people and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any


def count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step`, `2,000 steps` or `2 micro-batches`."""
    ending = "es" if noun.endswith(("ss", "tch")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def first_few(names: Sequence[str], limit: int) -> str:
    """Return the first `limit` names, each in backticks, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more


def clock(seconds: float) -> str:
    """Return seconds as `mm:ss` or `h:mm:ss`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def duration(seconds: float) -> str:
    """Return seconds in the two units that matter, such as `0.12 s` or `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    for unit, size, smaller, rest in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // rest)} {smaller}"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.0f} s"


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


def visible(text: str) -> str:
    """Return text in which what a terminal would obey is seen: all but new lines and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
