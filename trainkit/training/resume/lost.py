"""Why a checkpoint does not hold a value that training may go on with (rule 22)."""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from io import IOBase
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor

from trainkit.basics.rng import is_generator, state_of
from trainkit.training.resume.owners import is_of_library, is_owner
from trainkit.training.resume.values import SCALARS, is_large_of_graph

CONTAINERS = (list, tuple, dict, set, deque)
_CHANGED = (
    "has changed since training began, and no checkpoint holds {}: a resume begins with what is "
    "given to it. If training goes on with it{}, register an object whose `state_dict` gives it "
    "(`trainer.register_for_checkpointing`)."
)
_WEAK = (WeakKeyDictionary, WeakValueDictionary)
_MOST_VALUES = 10_000  # of a container that are looked at
_MOST_OBJECTS = 256  # around an object of a library
_LARGEST = 1 << 20  # bytes of an array that is read


def _why_changed(value: Any) -> str:
    """Return what is to be said of a value that is not saved, and whose trace is another."""
    if issubclass(type(value), CONTAINERS):
        containers = "lists and dicts of data sets, as caches and records are"
        return _CHANGED.format(containers, " (a replay buffer)")
    kind = type(value)
    what = "such a" if kind in _WEAK or hasattr(kind, "tobytes") else "attributes of a"
    of = f"{what} `{kind.__name__}` of `{kind.__module__.partition('.')[0]}`"
    return _CHANGED.format(of, " (a scaler, an environment)")


def trace_of(value: Any) -> Any:
    """Return what differs once a container, or an object of a library, has changed; None: nothing.

    Of a container it is how much it holds, and some of that; of an object the arrays and
    generators in it and in what it holds; of an array what it is.
    """
    value = dict(value) if type(value) in _WEAK else value
    kind = type(value)
    if issubclass(kind, CONTAINERS):
        inner = value.values() if issubclass(kind, dict) else value
        every = 1 + len(value) // _MOST_VALUES
        some = inner[::every] if issubclass(kind, list | tuple) else islice(inner, _MOST_VALUES)
        held = [each if type(each) in SCALARS else id(each) for each in some]
        return len(value), None if issubclass(kind, set) else hash(tuple(held))
    if not (_is_of_library(value) or hasattr(kind, "tobytes")):
        return None
    trace, waiting, seen = list[Any](), [value], set[int]()
    for each in islice(waiting, _MOST_OBJECTS):  # it grows
        if isinstance(each, Tensor):
            trace.append((id(each), None if each.is_inference() else each._version))
        elif hasattr(type(each), "tobytes"):
            of_objects = getattr(getattr(each, "dtype", None), "hasobject", False)
            is_read = getattr(each, "nbytes", 0) <= _LARGEST and not of_objects
            trace.append(blake2b(each.tobytes()).digest() if is_read else id(each))
        elif is_generator(each):
            trace.append(repr(state_of(each)))
        elif id(each) not in seen:
            seen.add(id(each))
            inner = vars(each) if _is_of_library(each) else each
            inner = inner.values() if type(inner) is dict else inner
            if type(inner) in (list, tuple) or inner is not each:
                waiting += [x for x in islice(inner, _MOST_OBJECTS) if type(x) not in SCALARS]
    return trace or None


def _is_of_library(value: Any) -> bool:
    return is_of_library(type(value)) and not is_owner(value)


def why_lost(
    value: Any,
    has_changed: bool,
    was_held: bool,
    is_data: bool,
    is_shard_of_its_own: Callable[[Any], bool],
) -> str:
    """Return what is to be said of a value that is not saved; nothing of most.

    Args:
        has_changed: Whether it has another trace than when training began.
        was_held: Whether it was saved before, or would have been.
        is_data: Whether a data set holds it, or a loader.
        is_shard_of_its_own: Whether a value is a shard, and none of the model's.
    """
    kind, why = type(value), ""
    if has_changed:
        return _why_changed(value)
    if was_held and issubclass(kind, list | dict | set | deque):
        why = (
            "has become what no checkpoint holds: it is too large or deep (a callback's may "
            "have 1 MiB of tensors), or has other things than numbers, text and tensors in it. "
            "A resume begins with what is given to it."
        )
    if is_data:
        return why
    if hasattr(kind, "__next__") and not issubclass(kind, IOBase):
        why = (
            "is an iterator, and no checkpoint holds where that is: a resume begins with what "
            "is given to it. Let `fit` read such a loader (`Combined`), or register an object "
            "with a `state_dict` that draws from it."
        )
    inner = value if issubclass(kind, list | tuple) else (value,)
    inner = value.values() if issubclass(kind, dict) else inner
    if any(map(is_shard_of_its_own, inner)):
        why = (
            "holds a tensor that is sharded, which a checkpoint has of the model and its "
            "optimizers alone: a resume begins with what is given to it. Register an object "
            "whose `state_dict` gives it (`trainer.register_for_checkpointing`)."
        )
    if any(map(is_large_of_graph, inner)):
        why = (
            "is large and of a graph, and is not saved: a resume begins with what is given to "
            "it. If a step goes on with it, keep it detached (`.detach()`)."
        )
    return why
