"""What a user's functions read from outside of themselves, and may change there."""

import builtins
import dis
import os
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from enum import Enum
from functools import cache, lru_cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from typing_extensions import override

from trainkit.basics.torch_internals import hooks_of

_Holder = CellType | dict[str, Any] | type
_STANDARD = Path(os.__file__).parent
_FUNCTIONS = (FunctionType, MethodType, partial)
_MISSING = object()


class Outside(MutableMapping[str, Any]):
    """What functions close over, the globals that they name, and more, to be read and set by name.

    That is also what they name of a user's modules (`losses.calls`), the attributes of a user's
    classes among these, attributes of the functions themselves and default values of arguments.
    Functions among all these, those in a `partial`, and methods of a user's classes are looked
    through as well. Of functions of installed libraries it is what they close over alone.

    Args:
        *functions: Where to begin. A class among them stands for its attributes.
        known: Whose variables are left out.
    """

    def __init__(self, *functions: Any, known: "Outside | None" = None) -> None:
        self._holders: dict[str, tuple[_Holder, str]] = {}
        others = {} if known is None else known._holders
        left_out = {(id(holder), own) for holder, own in others.values()}
        waiting, seen = list(functions), set[int]()
        while waiting:
            function = waiting.pop(0)
            if id(function) in seen:
                continue
            seen.add(id(function))
            for name, holder, own in _holders(function):
                value = _read(holder, own)
                if isinstance(value, FunctionType | MethodType | partial):
                    waiting.append(value)
                    continue
                kind = value if isinstance(value, type) else type(value)
                waiting += functions_of(kind) if is_users(kind) else []
                if (id(holder), own) in left_out:
                    continue
                key, other = name, f"{getattr(function, '__qualname__', 'partial')}.{name}"
                while self._holders.setdefault(key, (holder, own))[0] is not holder:
                    key, other = other, f"{other}'"  # there are others of that name

    @override
    def __getitem__(self, name: str) -> Any:
        value = _read(*self._holders[name])
        if value is _MISSING:
            raise KeyError(name)
        return value

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        holder, own = self._holders.get(name, ({}, name))  # it may be read no more
        if isinstance(holder, CellType):
            holder.cell_contents = value
        elif isinstance(holder, type):
            setattr(holder, own, value)
        else:
            holder[own] = value

    @override
    def __delitem__(self, name: str) -> None:
        holder, own = self._holders[name]
        if isinstance(holder, CellType):
            del holder.cell_contents
        elif isinstance(holder, type):
            delattr(holder, own)
        else:
            del holder[own]

    @override
    def __iter__(self) -> Iterator[str]:
        return (name for name in self._holders if name in self)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def outside_of(objects: Iterable[Any], known: Outside | None = None) -> Outside:
    """Return what the users' classes of objects hold, and what functions there and in them read."""
    objects = [*objects]
    kinds = dict.fromkeys(map(type, objects))
    users = dict.fromkeys(above for kind in kinds for above in kind.__mro__ if is_users(above))
    values = [each for one in objects for each in getattr(one, "__dict__", {}).values()]
    for module in (each for each in objects if isinstance(each, nn.Module)):  # hooks may be objects
        values += [h if isinstance(h, _FUNCTIONS) else partial(h) for h in hooks_of(module)]
    held = [each for each in (*objects, *values) if issubclass(type(each), _FUNCTIONS)]
    functions = [each for kind in kinds for each in functions_of(kind)]
    return Outside(*users, *functions, *held, known=known)


def functions_of(kind: type) -> list[Any]:
    """Return the functions of a user's class, and of the user's classes above it."""
    own = [each for above in kind.__mro__ if is_users(above) for each in vars(above).values()]
    plain = [getattr(each, "__func__", None) or getattr(each, "fget", each) for each in own]
    return [each for each in plain if isinstance(each, FunctionType)]


def is_users(code: type | FunctionType | ModuleType) -> bool:
    """Return whether a class, function or module stands in no installed library."""
    return _is_users(code.__name__ if isinstance(code, ModuleType) else code.__module__ or "")


@cache  # it is asked for each value, at each save
def _is_users(module: str) -> bool:
    if module.partition(".")[0] in ("trainkit", "builtins", "torch"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # a notebook's
        return module not in sys.builtin_module_names
    path = Path(file)
    is_installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    return not (is_installed or path.is_relative_to(_STANDARD))


def _holders(function: Any) -> Iterator[tuple[str, _Holder, str]]:
    """Yield what a function reads: what it is called, where it stands, and under which name."""
    if isinstance(function, partial):
        given = {str(index): each for index, each in enumerate(function.args)}
        yield "function", {"function": function.func}, "function"
        yield from ((n, holder, n) for holder in (given, function.keywords) for n in holder)
        return
    if isinstance(function, type):
        yield from _members(function.__name__, function, frozenset())
        return
    if isinstance(function, MethodType):
        yield "self", {"self": function.__self__}, "self"
        function = function.__func__
    code, known = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell, name
    if not is_users(function):
        return
    last = code.co_argcount
    defaults = function.__defaults__ or ()
    given = dict(zip(code.co_varnames[last - len(defaults) : last], defaults, strict=True))
    for holder in (given, function.__kwdefaults__ or {}, vars(function)):
        yield from ((name, holder, name) for name in holder)
    for name in sorted(_globals_named(code)):
        yield name, known, name
        yield from _members(name, known.get(name), _attributes_named(code))


def _members(name: str, value: Any, named: frozenset[str]) -> Iterator[tuple[str, _Holder, str]]:
    """Yield what is named of a module, and all that a class has."""
    is_module = isinstance(value, ModuleType)
    if not (is_module or isinstance(value, type)) or not is_users(value):
        return
    if not is_module and issubclass(value, Enum):
        return  # its members are what they are
    for key, each in [*vars(value).items()]:
        if key in named if is_module else not key.startswith("__"):
            yield f"{name}.{key}", vars(value) if is_module else value, key
            if is_module:
                yield from _members(f"{name}.{key}", each, named)


def _read(holder: _Holder, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name, _MISSING)
    if isinstance(holder, type):
        return vars(holder).get(name, _MISSING)
    try:
        return holder.cell_contents
    except ValueError:  # it is empty still
        return _MISSING


@lru_cache(maxsize=4096)  # it is asked at each epoch and save
def _globals_named(code: CodeType) -> frozenset[str]:
    """Return the globals that a function reads or sets, also those that are not there yet."""
    names = {each.argval for each in dis.get_instructions(code) if "GLOBAL" in each.opname}
    inner = (_globals_named(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(names).union(*inner) - vars(builtins).keys()


@lru_cache(maxsize=4096)
def _attributes_named(code: CodeType) -> frozenset[str]:
    inner = (_attributes_named(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inner)
