"""Values of attributes: which a checkpoint can hold, told apart, saved and put back (rule 22)."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.device import memory_of
from trainkit.basics.rng import is_generator, set_state, state_of
from trainkit.basics.torch_internals import tree_leaves, tree_map
from trainkit.containers import json_form, tree
from trainkit.containers.json_form import MALFORMED

_MOST = 100_000  # values in one attribute: what has more is data
_MOST_OPTIONS = 64
_MOST_FLAT = 1 << 20  # of these in one list or dict
_LARGEST_OF_GRAPH = 16 << 20  # bytes of a tensor: larger ones are activations to look at
_OBJECT = "$object"  # before the class and the parts of one
_KEYED = ""  # in the place of the class: a dict or set whose keys have parts
CONTENT = "[...]"
"""Stands, beside attributes, for what a list or dict of a user's class holds."""
SCALARS = (type(None), bool, int, float, complex, str)
IN_PLACE = (list, deque, dict, Counter, OrderedDict, defaultdict, set)
_PATHS = (PurePosixPath, PureWindowsPath, type(Path()))
_BY_ARGUMENTS = (Decimal, Fraction, date, datetime, time, slice, range, *_PATHS)
ENTRY = {
    "value?": Any,
    "generator?": Any,
    "is?": str,
    "copy?": str,
    "in_place?": bool,
    "requires_grad?": bool,
    "accelerator?": bool,
    "as_present?": bool,
    "gone?": bool,
    "objects?": bool,
    "began?": str,
    "began_as?": Any,
}
"""The form of what is saved of a value."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Tells whether a value is the same as before, and whether it is the same tensor.

    The version of a tensor would not do: what is changed by way of `.data` counts none.
    """

    digest: str
    tensor: "ref[Any] | None" = field(default=None, compare=False)  # or array
    scalar: tuple[Any, ...] = field(default=(), compare=False)  # where it is one


class _Refused(Exception):
    pass


class _Form(json_form.Encoder):
    """Finds the form of a value, in which digests stand for tensors and long strings of bytes."""

    def __init__(self, memory: Collection[int], largest: float, owners: Collection[int]) -> None:
        super().__init__(_MOST)
        self._memory, self._bytes_left, self._owners = memory, largest, owners

    @override
    def refused(self, why: str) -> Exception:
        return _Refused(why)

    @override
    def store(self, size: int, read: Callable[[], memoryview]) -> str:
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise self.refused("is too large")
        return blake2b(read()).hexdigest()

    @override
    def put_tensor(self, value: Any) -> Any:
        if not is_dense(value) or value.is_meta or is_large_of_graph(value):
            raise self.refused("has no values of its own, or is large and of a graph")
        if value.untyped_storage().data_ptr() in self._memory:
            raise self.refused("shares memory with a parameter or buffer")

        def read() -> memoryview:
            host = value.detach().resolve_conj().resolve_neg().cpu()
            return memory_of(host.contiguous())

        return [str(value.dtype), list(value.shape), self.store(value.nbytes, read)]

    @override
    def put_other(self, value: Any) -> Any:
        made_of = None if id(value) in self._owners else _parts(value)
        if made_of is None:
            raise self.refused("has no form")  # without its `repr`, which is the user's
        return self.put(made_of)


def mark_of(
    value: Any,
    memory: Collection[int] = (),
    largest: float = float("inf"),
    owners: Collection[int] = (),
) -> Mark | None:
    """Return the mark of a value; None if no checkpoint can hold it, or it is not of its own.

    Args:
        memory: Addresses of the parameters and buffers of the model.
        largest: How many bytes its tensors and arrays may have.
        owners: The `id` of objects whose attributes are looked after by themselves.
    """
    if type(value) in SCALARS:  # most are
        return Mark(f"{type(value).__name__} {value!r}", None, (value,))
    try:
        content = _content(value)
        node = content if _is_flat(content) else _Form(memory, largest, owners).put(content)
    except (_Refused, ReferenceError):  # a proxy of what is gone
        return None
    text = f"{type(value).__name__} {node!r}"
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Mark(digest, ref(value) if isinstance(value, Tensor) or _has_views(value) else None)


def entry_of(value: Any, mark: Mark, before: Mark | None) -> dict[str, Any]:
    """Return what is saved of a value; `before` is its mark when the training began."""
    entry: dict[str, Any] = {}
    if before is not None and before.scalar:
        entry["began_as"] = before.scalar[0]
    elif before is not None and not isinstance(value, Tensor):
        entry["began"] = before.digest
    content = _content(value)
    if is_generator(value):
        return entry | {"generator": content}
    if content is not value:
        entry["as_present"] = True
    if mark.tensor is not None:
        entry["in_place"] = bool(before and before.tensor and before.tensor() is value)
    if isinstance(value, Tensor):
        entry["requires_grad"] = value.requires_grad and value.is_leaf
    entry["value"] = content if _is_flat(content) else _taken_apart(content, entry)
    if not all(tensor.is_cpu for tensor in tree_leaves(content) if isinstance(tensor, Tensor)):
        entry["accelerator"] = True
    return entry


def put_back(
    values: MutableMapping[str, Any], key: str, entry: Mapping[str, Any], device: torch.device
) -> bool:
    """Let what stands under a key be what was saved; in place where others may hold it too.

    Returns:
        False where there is nothing of the kind that it was, which a checkpoint cannot make.
    """
    present: Any = values.get(key)
    if "generator" in entry:
        if is_generator(present):
            set_state(present, entry["generator"])
        return is_generator(present)
    value = entry["value"]
    if "accelerator" in entry:
        value = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)
    if "objects" in entry:
        try:
            value = _put_together(value)
        except MALFORMED:  # such a class is nowhere any more
            return False
    if "as_present" in entry:
        if not (isinstance(present, Enum | defaultdict) or hasattr(type(present), "_fields")):
            return False
        value = type(present)(value) if isinstance(present, Enum) else value
        value = type(present)(*value) if isinstance(present, tuple) else value  # type: ignore[misc]
    are_tensors = isinstance(present, Tensor) and isinstance(value, Tensor)
    stays = entry.get("in_place") or isinstance(present, nn.Parameter)
    if are_tensors and stays and present.shape == value.shape:
        with torch.no_grad():
            present.copy_(value)
    elif stays and _has_views(value) and getattr(present, "shape", None) == value.shape:
        present[...] = value
    elif isinstance(value, Tensor):
        values[key] = value.requires_grad_(bool(entry.get("requires_grad")))
    elif isinstance(present, IN_PLACE) and key != CONTENT and _room(present) == _room(value):
        present.clear()
        (present.extend if isinstance(present, list | deque) else present.update)(value)
    else:
        values[key] = value
    return True


def has_parts(value: Any) -> bool:
    """Return whether a value is a record, which comes back with new parts in it."""
    return _parts(value) is not None


def _parts(value: Any) -> tuple[Any, ...] | None:
    """Return what a value is made of that no codec knows, such as a record, after its class."""
    kind = type(value)
    if not _has_parts(kind) or (name := tree.name_of(kind)) is None:
        return None
    if issubclass(kind, Enum):
        return (_OBJECT, name, value.value)
    if kind in _BY_ARGUMENTS:
        return (_OBJECT, name, *value.__reduce__()[1])
    if tree.has_more_state(value):
        return None
    return (_OBJECT, name, *map(tuple, tree.parts(value)))


def _has_parts(kind: type) -> bool:
    is_record = hasattr(kind, "_make") or (is_dataclass(kind) and not hasattr(kind, "on_fit_start"))
    is_record = is_record and not issubclass(kind, dict | nn.Module)
    return issubclass(kind, Enum) or is_record or kind in _BY_ARGUMENTS


def _taken_apart(value: Any, entry: dict[str, Any]) -> Any:
    """Return a value without graphs, with the parts of what `_parts` knows, which `entry` notes."""
    each = partial(_taken_apart, entry=entry)
    if isinstance(value, Tensor):
        return value.detach()
    if (made_of := _parts(value)) is not None:
        entry["objects"] = True
        return (*made_of[:2], *map(each, made_of[2:]))
    if isinstance(value, set | frozenset | dict):
        of_keys: dict[str, Any] = {}
        keys = [_taken_apart(key, of_keys) for key in value]
        if of_keys:  # they may have no hash then
            entry["objects"] = True
            values = [*map(each, value.values())] if isinstance(value, dict) else []
            return (_OBJECT, _KEYED, _empty(value), keys, values)
    return _rebuilt(value, each)


def _empty(value: Any) -> Any:
    kind = type(value)
    return kind(value.default_factory) if kind is defaultdict else kind()


def _rebuilt(value: Any, each: Callable[[Any], Any]) -> Any:
    """Return a list, dict or the like with what `each` makes of the values in it."""
    kind = type(value)
    if kind in (list, tuple):
        return kind(map(each, value))
    if kind is deque:
        return deque(map(each, value), value.maxlen)
    if kind in IN_PLACE and isinstance(value, dict):
        return _filled(_empty(value), value, map(each, value.values()))
    return value


def _filled(made: Any, keys: Iterable[Any], values: Iterable[Any]) -> Any:
    """Return an empty container with keys, and values if it is a dict."""
    if isinstance(made, dict):
        for key, value in zip(keys, values, strict=True):
            made[key] = value
        return made
    return type(made)(keys)


def _put_together(value: Any) -> Any:
    """Return a value with objects for what `_taken_apart` has made of them."""
    if not (type(value) is tuple and value[:1] == (_OBJECT,)):
        return _rebuilt(value, _put_together)
    parts = [_put_together(part) for part in value[2:]]
    if value[1] == _KEYED:
        return _filled(*parts)
    kind: Any = tree.class_named(value[1])
    if not (_has_parts(kind) or kind is dict):
        raise ValueError(f"`{value[1]}` has no parts")
    is_made = issubclass(kind, Enum) or kind in _BY_ARGUMENTS
    return kind(*parts) if is_made else tree.build(kind, *parts)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one with values in memory."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def is_large_of_graph(value: Any) -> bool:
    """Return whether a value is a tensor that a graph has made, too large for a state."""
    is_made = issubclass(type(value), Tensor) and value.grad_fn is not None  # not by a dead proxy
    return is_made and value.nbytes > _LARGEST_OF_GRAPH


def is_array(value: Any) -> bool:
    """Return whether a value is an array or number of NumPy."""
    return type(value).__module__ == "numpy" and hasattr(value, "dtype")


def _has_views(value: Any) -> bool:
    return is_array(value) and type(value).__name__ == "ndarray"


def _content(value: Any) -> Any:
    """Return what is saved of a value whose kind no checkpoint can name, and else the value."""
    if isinstance(value, Enum | tuple) and _parts(value) is not None:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return tuple(value)
    if type(value) is defaultdict:
        factory = value.default_factory
        return value if factory is None or json_form.is_factory(factory) else dict(value)
    return state_of(value) if is_generator(value) else value


def is_holder(value: Any) -> bool:
    """Return whether a value is a list or dict of other things than scalars."""
    return type(value) in (list, tuple, dict) and not _is_flat(value)


def is_like(value: Any, held: Sequence[Tensor]) -> bool:
    """Return whether a list or dict has tensors of the shapes of those of a model, as averages."""
    inner = [*value.values()] if isinstance(value, dict) else value
    if not isinstance(inner, list) or not 0 < len(inner) <= len(held):
        return False
    shapes = {each.shape for each in held}
    return all(isinstance(each, Tensor) and each.shape in shapes for each in inner)


def is_options(value: Any) -> bool:
    """Return whether a value is a small dict of scalars by names, as settings are."""
    is_small = type(value) is dict and len(value) <= _MOST_OPTIONS
    return is_small and {*map(type, value)} <= {str} and _is_flat(value)


def _is_flat(value: Any) -> bool:
    """Return whether a value is a list or dict of scalars, which its `repr` tells exactly."""
    if type(value) not in (list, tuple, dict) or len(value) > _MOST_FLAT:
        return False
    inner = [*value, *value.values()] if type(value) is dict else value
    return {*map(type, inner)}.issubset(SCALARS)


def _room(value: Any) -> Any:
    """Return what two containers must have in common for one to take the place of the other."""
    return isinstance(value, dict) or (type(value), getattr(value, "maxlen", None))
