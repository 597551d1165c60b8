"""Turn the state of a part into strict JSON and tensors, and back, exactly (rule 28).

JSON holds its own types as they are. Everything else is an object with one key that begins with
`$` and names the type; docs/checkpoint-format.md lists them. Tensors, arrays and long byte strings
go to the safetensors file. No class is looked up by a name from a file. Two references to one
list or dict become two; tensors that share memory stay so.
"""

import base64
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trainkit.checkpoint.format.decoding import FACTORIES
from trainkit.checkpoint.format.names import tensor_name
from trainkit.checkpoint.format.tensor_file import Piece
from trainkit.checkpoint.format.tensor_location import StoredTensor
from trainkit.checkpoint.format.tensors import Sharing, kept_strides, refused_tensor, tensor_piece
from trainkit.errors import CheckpointError

__all__ = ["Encoded", "check_encodable", "encode", "encode_inline", "is_plain"]

DEEPEST = 64  # levels of nesting in a state
MOST_VALUES = 1 << 22  # in one state; also ends a walk through lists that hold each other

_INLINE = 256  # bytes; longer strings of bytes go to the safetensors file
_EXACT = 1 << 53  # other readers of JSON keep integers up to here


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state in the form in which it is written."""

    tree: Any  # what is not a tensor, in JSON's own types; unused where `is_plain`
    pieces: Mapping[str, Piece]  # the tensors by name
    is_plain: bool  # the state is a dict of tensors under the very names in `pieces`
    container: str  # type of the outermost dict, `dict` or `OrderedDict`, where `is_plain`
    version: int = 1  # the least of the format that has what is in it
    is_sharded: bool = False  # refers to tensors in other parts


def encode(state: Any, path: str) -> Encoded:
    """Return the form of `state`, which `path` names in errors.

    Tensors and arrays are read when they are written, not now.
    """
    encoder = _Encoder(path)
    tree = encoder.put(state)
    encoder.sharing.settle(encoder.pieces, path)
    container, version = type(state).__name__, encoder.version
    return Encoded(tree, encoder.pieces, is_plain(tree), container, version, encoder.is_sharded)


def is_plain(tree: Any) -> bool:
    """Return whether there is nothing in a tree that its tensors by themselves do not tell."""
    items = tree.get("$ordered", tree) if type(tree) is dict else None
    return (
        type(items) is dict
        and bool(items)
        and all(node == {"$tensor": name} for name, node in items.items())
    )


def encode_inline(state: Any, path: str) -> Any:
    """Return `state` in JSON's own types alone."""
    return _Encoder(path, inline=True).put(state)


def check_encodable(state: Any, path: str) -> None:
    """Raise the error that saving `state` would raise; tensors and arrays are not copied.

    `path` names `state` in errors, such as `callbacks.MyCallback`.
    """
    encode(state, path)


class _Encoder:
    """Walks through a state; `pieces` collects what goes to the safetensors file."""

    def __init__(self, path: str, *, inline: bool = False) -> None:
        self.pieces: dict[str, Piece] = {}
        self.sharing = Sharing()
        self.version = 1
        self.is_sharded = False
        self._path = path
        self._inline = inline
        self._keys: list[Any] = []  # from the root to the value that is being encoded
        self._parents: set[int] = set()
        self._count = 0
        self._in_key = False

    def put(self, value: Any) -> Any:
        """Return the form of any value."""
        self._count += 1
        if self._count > MOST_VALUES:
            raise self.refused(
                f"is the {MOST_VALUES + 1}th value: there are too many, or lists repeat"
            )
        writer = _WRITERS.get(type(value))
        return self._put_by_library(value) if writer is None else writer(self, value)

    def put_items(self, parent: Any, keys: Iterable[Any], values: Iterable[Any]) -> list[Any]:
        """Return the forms of the values in `parent`; `keys` names them in errors."""
        if id(parent) in self._parents:
            raise self.refused("contains itself")
        if len(self._keys) == DEEPEST:
            raise self.refused(f"is nested deeper than {DEEPEST} levels")
        self._parents.add(id(parent))
        self._keys.append(None)
        nodes = []
        for key, value in zip(keys, values, strict=True):
            self._keys[-1] = key
            nodes.append(self.put(value))
        self._keys.pop()
        self._parents.discard(id(parent))
        return nodes

    def put_pairs(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        """Return keys and values of a dict as a list of pairs."""
        was_in_key, self._in_key = self._in_key, True
        keys = self.put_items(value, value, value)
        self._in_key = was_in_key
        values = self.put_items(value, value, value.values())
        return [list(pair) for pair in zip(keys, values, strict=True)]

    def put_bytes(self, data: bytes) -> Any:
        """Return the form of a string of bytes."""
        if len(data) <= _INLINE or self._inline or self._in_key:
            return {"$bytes": base64.b64encode(data).decode("ascii")}
        name = self.new_name()
        self.pieces[name] = Piece("U8", (len(data),), lambda: memoryview(data))
        return {"$blob": name}

    def put_tensor(self, value: Any) -> Any:
        """Return the form of a tensor: the name under which it is stored."""
        why = refused_tensor(value)
        if self._inline or self._in_key:
            why = "is a tensor, which cannot stand here; make it a number or a list"
        if why is not None:
            raise self.refused(why)
        known = self.sharing.known(value)
        if known is not None:
            return known
        name = self.new_name()
        self.pieces[name], node = tensor_piece(value, name)
        if kept_strides(value) is not None:
            self.version = 3
        return self.sharing.add(value, name, node)

    def put_sharded(self, value: StoredTensor) -> Any:
        """Return the form of a tensor whose shards are parts of their own."""
        self.version, self.is_sharded = max(self.version, 2), True
        return {"$sharded": value.node()}

    def new_name(self) -> str:
        """Return a name for what is stored for the current value, made from its path."""
        return tensor_name(self._keys, self.pieces)

    def refused(self, why: str) -> CheckpointError:
        """Return the error on the current value."""
        steps = [_step(key) for key in self._keys]
        if len(steps) > 12:
            steps = [*steps[:8], "...", *steps[-2:]]
        return CheckpointError(
            f"`{self._path}{''.join(steps)}` {why}. A checkpoint holds tensors, arrays, numbers, "
            "text, bytes, and lists, tuples, sets and dicts of such; change what `state_dict` "
            "returns."
        )

    def _put_by_library(self, value: Any) -> Any:
        """Return the form of a value of torch or NumPy, if one of them is imported at all."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(value, torch.Tensor):
            return self.put_tensor(value)
        if torch is not None and type(value) is torch.Size:
            return {"$size": list(value)}
        if torch is not None and isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if torch is not None and isinstance(value, torch.device):
            return {"$device": str(value)}
        is_array = numpy is not None and type(value) is numpy.ndarray
        if is_array or (numpy is not None and isinstance(value, numpy.generic)):
            return self._put_array(value, "$array" if is_array else "$scalar")
        kind = type(value)
        text = repr(value) if callable(value) else ""
        raise self.refused(f"is a `{kind.__module__}.{kind.__qualname__}` {text[:80]}".rstrip())

    def _put_array(self, value: Any, tag: str) -> Any:
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise self.refused(f"is an array of dtype {value.dtype}, which holds objects or fields")
        if self._inline and tag == "$array":
            raise self.refused("is an array, which cannot stand here; make it a list")
        return {tag: [value.dtype.str, list(value.shape), self._put_array_bytes(value, tag)]}

    def _put_array_bytes(self, value: Any, tag: str) -> Any:
        if value.nbytes <= _INLINE or tag == "$scalar" or self._in_key:
            # An empty NumPy string says that it has no bytes, but hands out some.
            return self.put_bytes(value.tobytes() if value.dtype.itemsize else b"")
        name = self.new_name()
        self.pieces[name] = Piece("U8", (value.nbytes,), lambda: value.reshape(-1).view("u1").data)
        return {"$blob": name}


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _step(key: Any) -> str:
    is_name = type(key) is str and key.isidentifier()
    return f".{key}" if is_name else f"[{repr(key)[:80]}]"


def _put_int(_: _Encoder, value: int) -> Any:
    return value if -_EXACT <= value <= _EXACT else {"$int": hex(value)}


def _put_float(_: _Encoder, value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    known = {struct.pack(">d", float(text)): text for text in ("nan", "inf", "-inf")}
    return {"$float": known.get(bits, bits.hex())}


def _put_text(_: _Encoder, value: str) -> Any:
    if value.isascii() or _is_unicode(value):
        return value
    return {"$text": value.encode("utf-16-le", "surrogatepass").hex()}


def _put_list(encoder: _Encoder, value: Any) -> list[Any]:
    return encoder.put_items(value, range(len(value)), value)


def _put_set(encoder: _Encoder, value: Any) -> list[Any]:
    # Sorted by their form, as the order in a set changes from one process to the next.
    return sorted(encoder.put_items(value, value, value), key=repr)


def _put_dict(encoder: _Encoder, value: dict[Any, Any]) -> Any:
    is_object = all(
        type(key) is str and not key.startswith("$") and (key.isascii() or _is_unicode(key))
        for key in value
    )
    if not is_object:
        return {"$dict": encoder.put_pairs(value)}
    return dict(zip(value, encoder.put_items(value, value, value.values()), strict=True))


def _put_defaultdict(encoder: _Encoder, value: defaultdict[Any, Any]) -> Any:
    names = {factory: name for name, factory in FACTORIES.items()}
    factory = value.default_factory
    if factory is not None and factory not in names:
        raise encoder.refused(
            f"is a `defaultdict` of {factory!r}, which is none of {sorted(FACTORIES)}"
        )
    name = None if factory is None else names[factory]
    return {"$defaultdict": [name, encoder.put_pairs(value)]}


_WRITERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: _put_int,
    float: _put_float,
    complex: lambda encoder, value: {
        "$complex": [_put_float(encoder, value.real), _put_float(encoder, value.imag)]
    },
    str: _put_text,
    bytes: lambda encoder, value: encoder.put_bytes(value),
    bytearray: lambda encoder, value: {"$bytearray": encoder.put_bytes(bytes(value))},
    list: _put_list,
    tuple: lambda encoder, value: {"$tuple": _put_list(encoder, value)},
    set: lambda encoder, value: {"$set": _put_set(encoder, value)},
    frozenset: lambda encoder, value: {"$frozenset": _put_set(encoder, value)},
    dict: _put_dict,
    OrderedDict: lambda encoder, value: {"$ordered": _put_dict(encoder, value)},
    Counter: lambda encoder, value: {"$counter": encoder.put_pairs(value)},
    defaultdict: _put_defaultdict,
    timedelta: lambda _, value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
    StoredTensor: lambda encoder, value: encoder.put_sharded(value),
}
