"""Values of attributes: which a checkpoint can hold, told apart, saved and put back (rule 22)."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.device import memory_of
from trainkit.basics.rng import is_generator, set_state, state_of
from trainkit.basics.torch_internals import tree_leaves, tree_map
from trainkit.containers import json_form

_MOST = 100_000  # values in one attribute: what has more is data
_MOST_FLAT = 1 << 20  # of these in one list or dict
_LARGEST_OF_GRAPH = 16 << 20  # bytes of a tensor: larger ones are activations to look at
SCALARS = (type(None), bool, int, float, complex, str)
_IN_PLACE = (list, deque, dict, Counter, OrderedDict, defaultdict, set)
ENTRY = {
    "value?": Any,
    "generator?": Any,
    "is?": str,
    "copy?": str,
    "in_place?": bool,
    "requires_grad?": bool,
    "accelerator?": bool,
    "as_present?": bool,
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
    tensor: "ref[Tensor] | None" = field(default=None, compare=False)
    scalar: tuple[Any, ...] = field(default=(), compare=False)  # where it is one


class _Refused(Exception):
    pass


class _Form(json_form.Encoder):
    """Finds the form of a value, in which digests stand for tensors and long strings of bytes."""

    def __init__(self, memory: Collection[int], largest: float) -> None:
        super().__init__(_MOST)
        self._memory, self._bytes_left = memory, largest

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
        raise self.refused("has no form")  # without its `repr`, which is the user's


def mark_of(value: Any, memory: Collection[int] = (), largest: float = float("inf")) -> Mark | None:
    """Return the mark of a value; None if no checkpoint can hold it, or it is not of its own.

    Args:
        memory: Addresses of the parameters and buffers of the model.
        largest: How many bytes its tensors and arrays may have.
    """
    if type(value) in SCALARS:  # most are
        return Mark(f"{type(value).__name__} {value!r}", None, (value,))
    try:
        content = _content(value)
        node = content if _is_flat(content) else _Form(memory, largest).put(content)
    except (_Refused, ReferenceError):  # a proxy of what is gone
        return None
    text = f"{type(value).__name__} {node!r}"
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    tensor = ref(value) if isinstance(value, Tensor) else None
    return Mark(digest, tensor)


def entry_of(value: Any, mark: Mark, before: Mark | None) -> dict[str, Any]:
    """Return what is saved of a value; `before` is its mark when the training began."""
    entry: dict[str, Any] = {}
    if before is not None and before.scalar:
        entry["began_as"] = before.scalar[0]
    elif before is not None and mark.tensor is None:
        entry["began"] = before.digest
    content = _content(value)
    if is_generator(value):
        return entry | {"generator": content}
    if content is not value:
        entry["as_present"] = True
    if isinstance(value, Tensor):
        entry["in_place"] = bool(before and before.tensor and before.tensor() is value)
        entry["requires_grad"] = value.requires_grad and value.is_leaf
    entry["value"] = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, content)
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
    if "as_present" in entry:
        content = _content(present)
        if content is present and type(present) is not defaultdict:
            return False
        value = type(present)(value) if isinstance(present, Enum) else value
        value = type(present)(*value) if isinstance(present, tuple) else value  # type: ignore[misc]
    are_tensors = isinstance(present, Tensor) and isinstance(value, Tensor)
    stays = entry.get("in_place") or isinstance(present, nn.Parameter)
    if are_tensors and stays and present.shape == value.shape:
        with torch.no_grad():
            present.copy_(value)
    elif isinstance(value, Tensor):
        values[key] = value.requires_grad_(bool(entry.get("requires_grad")))
    elif isinstance(present, _IN_PLACE) and _room(present) == _room(value):
        present.clear()
        (present.extend if isinstance(present, list | deque) else present.update)(value)
    else:
        values[key] = value
    return True


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


def _content(value: Any) -> Any:
    """Return what is saved of a value whose kind no checkpoint can name, and else the value."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return tuple(value)
    if type(value) is defaultdict and not isinstance(value.default_factory, type):
        return dict(value)
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


def _is_flat(value: Any) -> bool:
    """Return whether a value is a list or dict of scalars, which its `repr` tells exactly."""
    if type(value) not in (list, tuple, dict) or len(value) > _MOST_FLAT:
        return False
    inner = [*value, *value.values()] if type(value) is dict else value
    return {*map(type, inner)}.issubset(SCALARS)


def _room(value: Any) -> Any:
    """Return what two containers must have in common for one to take the place of the other."""
    return isinstance(value, dict) or (type(value), getattr(value, "maxlen", None))
