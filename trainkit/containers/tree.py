"""What a container is: walk through one, change what it holds, take it apart and rebuild it.

Containers are mappings, lists, tuples, named tuples and data classes; the data classes of
transformers that are mappings too (`ModelOutput`) count as mappings: a field that is None is not
part of them. Anything else is a leaf.
"""

import copy
import dataclasses
import sys
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from trainkit.errors import DataError


def is_container(tree: Any) -> bool:
    """Return whether `tree` is a mapping, list, tuple or data class."""
    return isinstance(tree, Mapping | tuple | list) or _is_dataclass(tree)


def is_opaque(tree: Any) -> bool:
    """Return whether `tree` is an object that holds tensors and moves itself, such as a graph."""
    return not isinstance(tree, Tensor | dict | UserDict) and hasattr(tree, "to")


def is_array(value: Any) -> bool:
    """Return whether `value` is a tensor or a NumPy array."""
    if isinstance(value, Tensor):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def parts(tree: Any) -> tuple[list[Any], list[Any]]:
    """Return the keys of a container and the values under them, in order; empty for a leaf."""
    if isinstance(tree, Mapping):
        return list(tree), list(tree.values())
    if isinstance(tree, list | tuple):
        return list(getattr(tree, "_fields", range(len(tree)))), list(tree)
    names = [field.name for field in dataclasses.fields(tree)] if _is_dataclass(tree) else []
    return list(names), [getattr(tree, name) for name in names]


def children(tree: Any) -> Iterable[Any]:
    """Return what a container holds; nothing for a leaf."""
    return parts(tree)[1]


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return `tree` with new containers of the same types, and `function` applied to the rest.

    An object that moves itself by a method `to` is a leaf (see `is_opaque`).
    """
    if isinstance(tree, Tensor) or is_opaque(tree) or not is_container(tree):
        return function(tree)
    return map_children(tree, lambda child: map_leaves(child, function))


def map_children(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a new container of the same type, with `function` applied to what it holds."""
    if isinstance(tree, Mapping):
        values = {key: function(value) for key, value in tree.items()}
        if type(tree) is dict:
            return values
        if isinstance(tree, MutableMapping):
            # A mapping of its own class may carry more than its items: keep it, change the items.
            clone = copy.copy(tree)
            for key, value in values.items():
                clone[key] = value
            return clone
        try:
            return type(tree)(values)  # type: ignore[call-arg]
        except TypeError:
            return values
    if isinstance(tree, tuple | list):
        items = [function(item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    clone = copy.copy(tree)
    for field in dataclasses.fields(tree):
        object.__setattr__(clone, field.name, function(getattr(tree, field.name)))
    return clone


def named_tensors(tree: Any, path: str) -> list[tuple[str, Tensor]]:
    """Return the tensors in any nesting of containers, in order, each with its place."""
    if isinstance(tree, Tensor):
        return [(path, tree)]
    if not is_container(tree):
        raise DataError(
            f"`{path}` is a {type(tree).__name__}, but must be a tensor, or a nesting of them. "
            "Turn numbers into tensors with `torch.tensor`."
        )
    inside = zip(*parts(tree), strict=True)
    return [one for key, child in inside for one in named_tensors(child, f"{path}[{key!r}]")]


def map_tensors(function: Callable[[Tensor], Any], tree: Any, path: str) -> Any:
    """Return `tree` with new containers, and `function` applied to each tensor in it, in order.

    Raises:
        DataError: As `named_tensors`, before the first call of `function`.
    """
    named_tensors(tree, path)
    return _map_tensors(tree, function)


def _map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    return map_children(tree, lambda child: _map_tensors(child, function))


def copy_containers(tree: Any) -> Any:
    """Return a copy of `tree` that has its own containers and shares the tensors."""
    return map_leaves(tree, lambda leaf: leaf)


def count_samples(batch: Any) -> int:
    """Return the first tensor's first dimension, or else the length of the first list of leaves."""
    count = _rows(batch)
    if count is None:
        count = _length(batch)
    if count is None:
        raise DataError(
            f"The number of samples in a batch of type `{type(batch).__name__}` is not known: it "
            "holds no tensor with a first dimension and no list. Yield batches that hold one."
        )
    return count


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


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


def is_named(cls: type) -> bool:
    """Return whether `build` makes a `cls`: a named tuple, data class, dict or `UserDict`."""
    named_tuple = issubclass(cls, tuple) and hasattr(cls, "_make")
    return named_tuple or issubclass(cls, dict | UserDict) or dataclasses.is_dataclass(cls)


def build(cls: type, keys: list[Any], values: list[Any]) -> Any:
    """Return a `cls` with these parts; a data class without a call of `__init__`."""
    if issubclass(cls, tuple):
        make: Callable[[list[Any]], Any] = cls._make  # type: ignore[attr-defined]
        return make(values)
    if issubclass(cls, defaultdict):
        return cls(None, zip(keys, values, strict=True))
    if issubclass(cls, dict | UserDict) and not dataclasses.is_dataclass(cls):
        return cls(dict(zip(keys, values, strict=True)))
    parts = dict(zip(keys, values, strict=True))
    built: Any = dict.__new__(cls) if issubclass(cls, dict) else object.__new__(cls)
    is_mapping = isinstance(built, dict)
    for field in dataclasses.fields(built):
        if field.name in parts or is_mapping:
            # Frozen classes refuse plain assignment.
            object.__setattr__(built, field.name, parts.get(field.name))
    if is_mapping:
        for key, value in parts.items():
            built[key] = value
    return built


def has_more_state(value: Any) -> bool:
    """Return whether `value` holds attributes beside its `parts`."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or isinstance(value, UserDict):
        return False  # the other attributes of a UserDict are made by its constructor
    if dataclasses.is_dataclass(value):
        return bool(attributes.keys() - {field.name for field in dataclasses.fields(value)})
    return True


def name_of(cls: type) -> str | None:
    """Return the name under which `class_named` finds `cls`; None for local classes."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    return name if class_named(name) is cls else None


def class_named(name: str) -> type | None:
    """Return the class of that name in its module or the public one around, if it is imported."""
    module, _, qualified = name.partition(":")
    obj: Any = sys.modules.get(module) or sys.modules.get(module.partition("._")[0])
    for part in qualified.split("."):
        obj = getattr(obj, part, None)
    return obj if isinstance(obj, type) else None
