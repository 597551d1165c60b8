"""Walks through the containers of a batch: copy them, change their leaves, count their samples."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from trainkit.errors import DataError

__all__ = [
    "children",
    "copy_containers",
    "count_samples",
    "is_container",
    "is_opaque",
    "map_children",
    "map_leaves",
]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return `tree` with new containers of the same types, and `function` applied to the rest.

    Containers are mappings, lists, tuples, named tuples and dataclasses. Anything else is a leaf,
    and so is an object that moves itself by a method `to` (see `is_opaque`).
    """
    if isinstance(tree, Tensor) or is_opaque(tree) or not is_container(tree):
        return function(tree)
    return map_children(tree, lambda child: map_leaves(child, function))


def map_children(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a new container of the same type, with `function` applied to what it holds."""
    if isinstance(tree, Mapping):
        return _map_mapping(tree, function)
    if isinstance(tree, tuple | list):
        mapped = [function(item) for item in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    clone = copy.copy(tree)
    for field in fields(tree):
        object.__setattr__(clone, field.name, function(getattr(tree, field.name)))
    return clone


def is_container(tree: Any) -> bool:
    """Return whether `tree` is a mapping, list, tuple or dataclass."""
    if isinstance(tree, Mapping | tuple | list):
        return True
    return is_dataclass(tree) and not isinstance(tree, type)


def is_opaque(tree: Any) -> bool:
    """Return whether `tree` is an object that holds tensors and moves itself, such as a graph."""
    return hasattr(tree, "to") and not isinstance(tree, Tensor | dict | UserDict)


def copy_containers(tree: Any) -> Any:
    """Return a copy of `tree` that has its own containers and shares the tensors."""
    return map_leaves(tree, _same)


def count_samples(batch: Any) -> int:
    """Return the first tensor's first dimension, or else the length of the first list of leaves.

    Raises:
        DataError: `batch` holds neither.
    """
    count = _rows(batch)
    if count is None:
        count = _length(batch)
    if count is None:
        raise DataError(
            f"The number of samples in a batch of type `{type(batch).__name__}` is not known: it "
            "holds no tensor with a first dimension and no list. Yield batches that hold one."
        )
    return count


def _same(leaf: Any) -> Any:
    return leaf


def _map_mapping(tree: Mapping[Any, Any], function: Callable[[Any], Any]) -> Any:
    mapped = {key: function(value) for key, value in tree.items()}
    if type(tree) is dict:
        return mapped
    if isinstance(tree, MutableMapping):
        # A mapping of its own class may carry more than its items: keep it, change the items.
        clone = copy.copy(tree)
        for key, value in mapped.items():
            clone[key] = value
        return clone
    try:
        return type(tree)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def children(tree: Any) -> Iterable[Any]:
    """Return what a container holds; nothing for a leaf."""
    if isinstance(tree, Mapping):
        return tree.values()
    if isinstance(tree, list | tuple):
        return tree
    if is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in fields(tree)]
    return ()


def _rows(tree: Any) -> int | None:
    shape = getattr(tree, "shape", None)
    if isinstance(shape, tuple) and shape:
        return int(shape[0])
    for child in children(tree):
        rows = _rows(child)
        if rows is not None:
            return rows
    return None


def _length(tree: Any) -> int | None:
    for child in children(tree):
        length = _length(child)
        if length is not None:
            return length
    return len(tree) if isinstance(tree, list) else None
