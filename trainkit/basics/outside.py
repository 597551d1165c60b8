"""What a user's functions read from outside of themselves, and may change there."""

import builtins
import dis
import os
import sys
from collections.abc import Iterator, MutableMapping
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from typing_extensions import override

_Place = CellType | dict[str, Any]
_STANDARD = Path(os.__file__).parent
_MISSING = object()


class Outside(MutableMapping[str, Any]):
    """What functions close over, and the globals that they name, to be read and set by name.

    Functions among these, and those in a `partial`, are looked through as well. Of functions of
    installed libraries it is what they close over alone.

    Args:
        *functions: Where to begin.
    """

    def __init__(self, *functions: Any) -> None:
        self._places: dict[str, tuple[_Place, str]] = {}
        waiting, seen = list(functions), set[int]()
        while waiting:
            function = waiting.pop(0)
            if id(function) in seen:
                continue
            seen.add(id(function))
            for name, place in _places(function):
                value = _read(place, name)
                if isinstance(value, FunctionType | MethodType | partial):
                    waiting.append(value)
                    continue
                known = self._places.setdefault(name, (place, name))
                if known[0] is not place:  # another of that name
                    key = f"{getattr(function, '__qualname__', 'partial')}.{name}"
                    self._places[key] = place, name

    @override
    def __getitem__(self, name: str) -> Any:
        value = _read(*self._places[name])
        if value is _MISSING:
            raise KeyError(name)
        return value

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        place, own = self._places.get(name, ({}, name))  # it may be read no more
        if isinstance(place, CellType):
            place.cell_contents = value
        else:
            place[own] = value

    @override
    def __delitem__(self, name: str) -> None:
        raise NotImplementedError

    @override
    def __iter__(self) -> Iterator[str]:
        return (name for name in self._places if name in self)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def functions_of(kind: type) -> list[Any]:
    """Return the functions of a user's class, and of the user's classes above it."""
    own = [each for above in kind.__mro__ if is_users(above) for each in vars(above).values()]
    plain = [getattr(each, "__func__", None) or getattr(each, "fget", each) for each in own]
    return [each for each in plain if isinstance(each, FunctionType)]


def is_users(code: type | FunctionType) -> bool:
    """Return whether a class or function stands in no installed library."""
    module = code.__module__ or ""
    if module.partition(".")[0] in ("trainkit", "builtins", "torch"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # a notebook's
        return module not in sys.builtin_module_names
    path = Path(file)
    is_installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    return not (is_installed or path.is_relative_to(_STANDARD))


def _places(function: Any) -> Iterator[tuple[str, _Place]]:
    if isinstance(function, partial):
        given = {str(index): each for index, each in enumerate(function.args)}
        yield from (("function", {"function": function.func}), *((n, given) for n in given))
        yield from ((name, function.keywords) for name in function.keywords)
        return
    function = getattr(function, "__func__", function)
    code, known = function.__code__, function.__globals__
    yield from zip(code.co_freevars, function.__closure__ or (), strict=True)
    if is_users(function):
        yield from ((name, known) for name in sorted(_globals_named(code)))


def _read(place: _Place, name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name, _MISSING)
    try:
        return place.cell_contents
    except ValueError:  # it is empty still
        return _MISSING


def _globals_named(code: CodeType) -> set[str]:
    """Return the globals that a function reads or sets, also those that are not there yet."""
    names = {each.argval for each in dis.get_instructions(code) if "GLOBAL" in each.opname}
    inner = (_globals_named(each) for each in code.co_consts if isinstance(each, CodeType))
    return names.union(*inner) - vars(builtins).keys()
