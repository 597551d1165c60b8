"""Results of all shapes as a flat table of figures."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.errors import DataError

__all__ = ["flatten"]


def flatten(metric: str, result: Any) -> dict[str, float]:
    """Return `result` as figures by name, nested names joined by `/`.

    Args:
        metric: Name of the metric, and of the figure where `result` is a single number.
        result: A number, an array, or any nesting of mappings and sequences of them. Entries of
            arrays and sequences are named by their index.

    Raises:
        DataError: An entry is not a number, or two have the same name.
    """
    figures: dict[str, float] = {}
    for key, value in _entries("" if isinstance(result, Mapping) else metric, result):
        if isinstance(value, str) or not isinstance(value, int | float):
            raise DataError(
                f"The metric `{metric}` returned a {type(value).__name__} under `{key}`, but a "
                "figure must be a number. Wrap the metric in a function that returns only numbers."
            )
        if key in figures:
            raise DataError(
                f"The metric `{metric}` returned two figures named `{key}`. Rename one of them."
            )
        figures[key] = float(value)
    return figures


def _entries(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if hasattr(value, "tolist"):  # tensors, NumPy arrays and NumPy scalars
        value = value.tolist()
    if isinstance(value, Mapping):
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        pairs = enumerate(value)
    else:
        yield key, value
        return
    for name, entry in pairs:
        yield from _entries(f"{key}/{name}" if key else str(name), entry)
