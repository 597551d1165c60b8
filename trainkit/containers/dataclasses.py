"""Take apart and rebuild objects that are containers: named tuples, data classes, mappings."""

import dataclasses
import sys
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any

__all__ = ["build", "find", "has_more_state", "is_container", "name_of", "parts"]

Parts = tuple[list[Any], list[Any]]
"""The keys of an object and the values under them, in order."""


def parts(value: Any) -> Parts | None:
    """Return keys and values of a named tuple, data class or mapping; None for other objects.

    The data classes of transformers that are mappings too (`ModelOutput`) count as mappings: a
    field that is None is not part of them.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields), list(value)
    if isinstance(value, dict | UserDict):
        return list(value.keys()), list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return list(names), [getattr(value, name) for name in names]
    return None


def is_container(cls: type) -> bool:
    """Return whether `parts` takes instances of `cls` apart."""
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
    return _build_dataclass(cls, dict(zip(keys, values, strict=True)))


def _build_dataclass(cls: type, values: dict[str, Any]) -> Any:
    built: Any = object.__new__(cls) if not issubclass(cls, dict) else dict.__new__(cls)
    is_mapping = isinstance(built, dict)
    for field in dataclasses.fields(cls):
        if field.name in values or is_mapping:
            # Frozen classes refuse plain assignment.
            object.__setattr__(built, field.name, values.get(field.name))
    if is_mapping:
        for key, value in values.items():
            built[key] = value
    return built


def has_more_state(value: Any) -> bool:
    """Return whether `value` holds attributes that `parts` does not return."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or isinstance(value, UserDict):
        return False  # the other attributes of a UserDict are made by its constructor
    if dataclasses.is_dataclass(value):
        return bool(attributes.keys() - {field.name for field in dataclasses.fields(value)})
    return True


def name_of(cls: type) -> str | None:
    """Return the name under which `find` finds `cls`; None if it does not, as for local ones."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    return name if find(name) is cls else None


def find(name: str) -> type | None:
    """Return the class of that name from a module already imported; nothing is imported."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
