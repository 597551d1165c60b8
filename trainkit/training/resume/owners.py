"""Which objects hold values that a training changes, and how these are read and set (rule 22)."""

import copy
import inspect
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Collection, Iterable, MutableMapping
from dis import get_instructions
from enum import Enum
from functools import cache, cached_property, partial
from queue import LifoQueue, PriorityQueue, Queue
from random import Random
from types import FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from trainkit.basics.outside import Outside, is_users
from trainkit.basics.rng import is_generator
from trainkit.basics.torch_internals import parameters_of
from trainkit.checkpoint.exact import load_state
from trainkit.metrics.metric import Metric
from trainkit.training.resume.values import CONTENT, IN_PLACE

STATE = "state"
"""Stands for the attributes of what has a `state_dict`."""
OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
"""What torch itself keeps in a module."""
_EXTRA_STATE = nn.Module.get_extra_state
_NO_OWNERS = (DataLoader, Dataset, Enum, LRScheduler, Optimizer, Sampler, tuple, type)
_DICTS = tuple(kind for kind in IN_PLACE if issubclass(kind, dict))
_PLAIN = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, Queue, LifoQueue, PriorityQueue)
_FUNCTIONS = (FunctionType, MethodType, partial)
_NUMBERS = {bool, int, float}
_SHARED = "multiprocessing.sharedctypes"


def is_owner(value: Any) -> bool:
    """Return whether a value is a module, or has a state or attributes of a user's to be saved."""
    kind = type(value)
    if issubclass(kind, nn.Module) or kind in _PLAIN or has_state(value):
        return True
    if kind.__module__ == _SHARED:
        return hasattr(kind, "value")
    if hasattr(kind, "partial_fit"):  # an estimator, whose attributes are what it has learnt
        return True
    if is_of_library(kind) and (held := vars(value)) and {*map(type, held.values())} <= _NUMBERS:
        return True  # a meter
    is_other = issubclass(kind, _NO_OWNERS) or hasattr(kind, "on_fit_start")
    return not is_other and is_users(kind)


def is_of_library(kind: type) -> bool:
    """Return whether a class is one of a library with attributes, and neither torch's nor ours."""
    is_ours = kind.__module__.partition(".")[0] in ("builtins", "numpy", "torch", "trainkit")
    is_ours = is_ours or issubclass(kind, Random)  # a generator
    return kind.__dictoffset__ != 0 and not (is_ours or is_users(kind))


def has_state(value: Any) -> bool:
    """Return whether it is an object of a library with a `state_dict`, and is not data."""
    kind = type(value)
    if issubclass(kind, LRScheduler | Optimizer):
        return True
    if not (hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")):
        return False
    is_read = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    is_other = is_read or issubclass(kind, nn.Module | type) or hasattr(kind, "on_fit_start")
    return not (is_other or is_users(kind) or kind.__module__.startswith("trainkit."))


def of_container(held: Any) -> dict[str, Any]:
    """Return what is looked after in a list or dict: generators, and what a dict of objects has."""
    is_dict = type(held) is dict
    if is_dict and {*map(type, held)} == {str} and any(map(is_owner, held.values())):
        return held  # type: ignore[no-any-return]
    items = held.items() if is_dict else enumerate(held)
    return {f"{key}": each for key, each in items if is_generator(each)}


def copy_of(value: Any) -> Any:
    """Return a copy of an object, whose lists and dicts are its own."""
    made = copy.copy(value)
    attributes = attributes_in(made)
    for key, each in [*attributes.items()]:
        if isinstance(each, (list, dict, set, deque)):
            attributes[key] = copy.copy(each)
    return made


class _Slots(dict[str, Any]):
    """What is in slots, the attributes of an object, and what it holds, to be read and set."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        found = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
        super().__init__(found | getattr(owner, "__dict__", {}))
        self._owner, self._kind = owner, _container(type(owner))
        if kind := self._kind:  # past the methods of the user's class
            keys = [*kind.__iter__(owner)]
            held = {key: kind.__getitem__(owner, key) for key in keys} if kind in _DICTS else keys
            super().__setitem__(CONTENT, held)

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        if key == CONTENT and self._kind:
            self._kind.clear(self._owner)
            if isinstance(value, dict):
                for name, each in value.items():
                    self._kind.__setitem__(self._owner, name, each)
            else:
                (self._kind.update if self._kind is set else self._kind.extend)(self._owner, value)
        else:
            object.__setattr__(self._owner, key, value)

    @override
    def pop(self, key: str, *default: Any) -> Any:
        value = super().pop(key, *default)
        if hasattr(self._owner, key):
            object.__delattr__(self._owner, key)
        return value


def _container(kind: Any) -> Any:
    """Return which list, dict, set or deque a user's class is one of."""
    return next((k for k in kind.__mro__ if k in IN_PLACE), None) if is_users(kind) else None


class StateOf(dict[str, Any]):
    """The state of what has a `state_dict`, to be read and set."""

    def __init__(self, owner: Any) -> None:
        try:
            state = owner.state_dict()
        except Exception as error:  # no checkpoint holds it, which is told
            state = {"refused": error}
        super().__init__({STATE: state})
        self._owner = owner

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        load_state(self._owner, value)


def is_others(value: Any) -> bool:
    """Return whether neither torch nor trainkit has the class of a value."""
    return not type(value).__module__.startswith(("torch.", "trainkit."))


def of_callbacks(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks of users' classes without a state of their own, and all metrics, by name."""
    owners: dict[str, Any] = {}
    for each in callbacks:
        # A `MainProcess` stands for the one inside.
        one: Any = each if is_users(type(each)) else getattr(each, "callback", None)
        saves = getattr(getattr(one, "state_dict", None), "__func__", None)
        if saves is not None and is_users(type(one)) and not is_users(saves):
            owners[one.name] = one
        held = getattr(each, "metrics", ())
        if isinstance(held, list):
            owners |= {f"metric {m.name}": m for m in held if isinstance(m, Metric)}
    return owners


def functions_in(objects: Iterable[Any]) -> list[Any]:
    """Return what optimizers and schedules call: their hooks, and functions that give rates."""
    tools = [each for each in objects if isinstance(each, Optimizer | LRScheduler)]
    held = [value for each in tools for value in vars(each).values()]
    called = [each for value in held if isinstance(value, dict) for each in value.values()]
    called += [each for value in held if isinstance(value, list) for each in value]
    inner = [each for each in called if isinstance(each, LRScheduler)]
    functions = [each for each in called if isinstance(each, _FUNCTIONS)]
    return functions + (functions_in(inner) if inner else [])


def beside(objects: Iterable[Any]) -> dict[str, "Beside"]:
    """Return what stands for optimizers and schedules among the objects that are not torch's."""
    found: dict[str, Beside] = {}
    for each in objects:
        if isinstance(each, Optimizer | LRScheduler) and is_others(each):
            name = type(each).__name__
            found[f"{name}'" if name in found else name] = Beside(each)
    return found


class Beside:
    """Stands for what an optimizer or schedule of a library or a user's holds beside its state."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def attributes(self) -> MutableMapping[str, Any]:
        """Return the attributes, to be read and set; of a schedule what has a state of its own."""
        held, is_schedule = _Slots(self.owner, []), isinstance(self.owner, LRScheduler)
        for name, value in [*held.items()]:
            is_state = isinstance(value, dict) and any(isinstance(key, Tensor) for key in value)
            is_saved = name in _of_every_optimizer() or is_state
            if not is_owner(value) if is_schedule else is_saved:
                del held[name]
        return held


@cache
def _of_every_optimizer() -> set[str]:
    """Return what each optimizer of torch has; to make one, torch imports its compiler."""
    return vars(SGD([torch.zeros(())])).keys() | {"_opt_called", "step"}


def state_of_schedule(schedule: Any) -> Any:
    """Return what a checkpoint holds of a schedule: its state without functions and objects.

    A schedule around another has that in its state, by the `state_dict` of torch; it is saved apart
    (`Beside`), and functions are what they are when the schedule is made again.
    """
    if isinstance(by_name := getattr(schedule, "by_name", None), dict):
        return {name: state_of_schedule(each) for name, each in by_name.items()}
    state = schedule.state_dict()
    if type(state) is not dict or not is_others(schedule):
        return state
    return {k: v for k, v in state.items() if not (is_owner(v) or isinstance(v, _FUNCTIONS))}


def attributes_in(owner: Any) -> MutableMapping[str, Any]:
    """Return the attributes of an object, or what functions read, to be read and set."""
    if isinstance(owner, Beside):
        return owner.attributes()
    if isinstance(owner, Outside | dict) and _container(type(owner)) is None:
        return owner
    if has_state(owner):
        return StateOf(owner)
    if isinstance(owner, FunctionType | partial):
        return Outside(owner)
    if owner is None or isinstance(owner, type):
        return {}
    slots = [] if isinstance(owner, nn.Module) else _slots_of(type(owner))
    if slots or _container(type(owner)):
        return _Slots(owner, slots)
    attributes: dict[str, Any] = getattr(owner, "__dict__", {})
    return attributes


def _slots_of(kind: type) -> list[str]:
    if kind.__module__ == _SHARED:
        return ["value"]
    own = (pair for each in kind.__mro__ if is_users(each) for pair in vars(each).items())
    return [name for name, value in own if isinstance(value, MemberDescriptorType)]


def values_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of an owner, without those that it can make again."""
    if isinstance(owner, nn.Module) and type(owner).get_extra_state is not _EXTRA_STATE:
        return {}  # it says itself what is saved of it
    left_out: Collection[str] = ()
    if isinstance(owner, nn.Module):
        made = (name.removesuffix("_orig").removesuffix("_v") for name in parameters_of(owner))
        # Norms of weights make them in a forward; pruning too, but it reads what the last one made.
        left_out = {*OF_EVERY_MODULE, *(n for n in made if not hasattr(owner, f"{n}_mask"))}
    elif hasattr(type(owner), "on_fit_start"):
        left_out = _saved_by_shipped(owner.__class__)
    return {
        key: value
        for key, value in attributes_in(owner).items()
        if type(key) is str and key not in left_out
        if not isinstance(getattr(type(owner), key, None), cached_property)
    }


@cache
def _saved_by_shipped(kind: Any) -> set[str]:
    """Return the attributes that classes of trainkit set, whose `state_dict` says what is saved."""
    shipped = [vars(each) for each in kind.__mro__ if each.__module__.startswith("trainkit.")]
    code = [each for own in shipped for each in own.values() if isinstance(each, FunctionType)]
    steps = (step for each in code for step in get_instructions(inspect.unwrap(each)))
    return {step.argval for step in steps if step.opname == "STORE_ATTR"}
