"""Turn values into JSON's own types and back, exactly, for checkpoints and for messages (rule 28).

JSON holds its own types as they are. Everything else is an object with one key that begins with
`$` and names the type; docs/checkpoint-format.md lists them. Who inherits says what becomes of
tensors, of long strings of bytes, and of all that has no form here. Two references to one list or
dict become two. No class is looked up by a name; torch and NumPy are not imported.
"""

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, ClassVar

DEEPEST = 64  # levels of nesting in a value

MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What is raised where JSON is not of the form that an encoder writes."""

_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (
        *(bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple),
        *(Counter, OrderedDict, defaultdict, deque),
    )
}
"""What a `defaultdict` may make its values with."""
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}

_DEEPEST_JSON = 256  # levels; a level of a value makes up to three
_INLINE = 256  # bytes; longer strings of bytes are stored beside the JSON
_EXACT = 1 << 53  # other readers of JSON keep integers up to here
_NUMPY_DTYPE = re.compile(r"[<>|=]?[A-Za-z][0-9]*(\[[0-9]*[A-Za-z]+\])?")


class Encoder:
    """Walks through a value.

    Args:
        most: How many values there may be; also ends a walk through lists that hold each other.
        inline: Whether nothing may stand beside the JSON.
    """

    def __init__(self, most: float = math.inf, *, inline: bool = False) -> None:
        self.keys: list[Any] = []  # from the root to the value that is being encoded
        self.is_inline = inline
        self._most = most
        self._count = 0
        self._parents: set[int] = set()

    def refused(self, why: str) -> Exception:
        """Return the error on the current value; `why` follows its name."""
        raise NotImplementedError

    def store(self, size: int, read: Callable[[], memoryview]) -> Any:
        """Store bytes beside the JSON; return what names them there."""
        raise NotImplementedError

    def put_tensor(self, value: Any) -> Any:
        """Return the form of a tensor."""
        raise NotImplementedError

    def put_other(self, value: Any) -> Any:
        """Return the form of a value that has none here."""
        kind = type(value)
        text = repr(value) if callable(value) else ""
        if kind is defaultdict:
            text = f"of {value.default_factory!r}, which is none of {sorted(_FACTORIES)}"
        raise self.refused(f"is a `{kind.__module__}.{kind.__qualname__}` {text[:200]}".rstrip())

    def put(self, value: Any) -> Any:
        self._count += 1
        if self._count > self._most:
            raise self.refused(
                f"is the {self._most + 1}th value: there are too many, or lists repeat"
            )
        writer = _WRITERS.get(type(value))
        return self._put_by_library(value) if writer is None else writer(self, value)

    def put_items(self, parent: Any, keys: Iterable[Any], values: Iterable[Any]) -> list[Any]:
        """Return the forms of the values in `parent`; `keys` names them in errors."""
        if id(parent) in self._parents:
            raise self.refused("contains itself")
        if len(self.keys) == DEEPEST:
            raise self.refused(f"is nested deeper than {DEEPEST} levels")
        self._parents.add(id(parent))
        self.keys.append(None)
        nodes = []
        for key, value in zip(keys, values, strict=True):
            self.keys[-1] = key
            nodes.append(self.put(value))
        self.keys.pop()
        self._parents.discard(id(parent))
        return nodes

    def put_pairs(self, value: Mapping[Any, Any]) -> list[list[Any]]:
        """Return keys and values of a dict as a list of pairs."""
        was_inline, self.is_inline = self.is_inline, True
        keys = self.put_items(value, value, value)
        self.is_inline = was_inline
        values = self.put_items(value, value, value.values())
        return [list(pair) for pair in zip(keys, values, strict=True)]

    def put_bytes(self, data: bytes) -> Any:
        if len(data) <= _INLINE or self.is_inline:
            return {"$bytes": base64.b64encode(data).decode("ascii")}
        return {"$blob": self.store(len(data), lambda: memoryview(data))}

    def put_array(self, value: Any, tag: str) -> Any:
        """Return the form of an array of NumPy, or of one of its scalars; `tag` says which."""
        if value.dtype.hasobject or value.dtype.kind == "V":
            raise self.refused(f"is an array of dtype {value.dtype}, which holds objects or fields")
        if value.nbytes > _INLINE and tag == "$array" and not self.is_inline:
            name = self.store(value.nbytes, lambda: value.reshape(-1).view("u1").data)
            data = {"$blob": name}
        else:
            # An empty NumPy string says that it has no bytes, but hands out some.
            data = self.put_bytes(value.tobytes() if value.dtype.itemsize else b"")
        return {tag: [value.dtype.str, list(value.shape), data]}

    def _put_by_library(self, value: Any) -> Any:
        """Return the form of a value of torch or NumPy, if one of them is imported at all."""
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                return self.put_tensor(value)
            if type(value) is torch.Size:
                return {"$size": list(value)}
            if isinstance(value, torch.dtype):
                return {"$dtype": str(value).removeprefix("torch.")}
            if isinstance(value, torch.device):
                return {"$device": str(value)}
        if numpy is not None and type(value) is numpy.ndarray:
            return self.put_array(value, "$array")
        if numpy is not None and isinstance(value, numpy.generic):
            return self.put_array(value, "$scalar")
        return self.put_other(value)


def is_factory(value: Any) -> bool:
    """Return whether a `defaultdict` that makes its values with this has a form."""
    return isinstance(value, type) and value in _FACTORY_NAMES


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _put_float(_: Encoder, value: float) -> Any:
    if math.isfinite(value):
        return value
    bits = struct.pack(">d", value)
    known = {struct.pack(">d", float(text)): text for text in ("nan", "inf", "-inf")}
    return {"$float": known.get(bits, bits.hex())}


def _put_text(_: Encoder, value: str) -> Any:
    if _is_unicode(value):
        return value
    return {"$text": value.encode("utf-16-le", "surrogatepass").hex()}


def _put_list(encoder: Encoder, value: Any) -> list[Any]:
    return encoder.put_items(value, range(len(value)), value)


def _put_set(encoder: Encoder, value: Any) -> list[Any]:
    # Sorted by their form, as the order in a set changes from one process to the next.
    return sorted(encoder.put_items(value, value, value), key=repr)


def _put_dict(encoder: Encoder, value: dict[Any, Any]) -> Any:
    if not all(type(k) is str and not k.startswith("$") and _is_unicode(k) for k in value):
        return {"$dict": encoder.put_pairs(value)}
    return dict(zip(value, encoder.put_items(value, value, value.values()), strict=True))


def _put_defaultdict(encoder: Encoder, value: defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    if not (factory is None or is_factory(factory)):
        return encoder.put_other(value)
    name = None if factory is None else _FACTORY_NAMES[factory]
    return {"$defaultdict": [name, encoder.put_pairs(value)]}


_WRITERS: dict[type, Callable[[Any, Any], Any]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: lambda _, value: value if -_EXACT <= value <= _EXACT else {"$int": hex(value)},
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
    deque: lambda encoder, value: {"$deque": [value.maxlen, _put_list(encoder, value)]},
    defaultdict: _put_defaultdict,
    timedelta: lambda _, value: {"$timedelta": [value.days, value.seconds, value.microseconds]},
}


class Decoder:
    """Makes values of what an encoder returned.

    What is not of that form raises one of `MALFORMED`.
    """

    def __init__(self) -> None:
        self._depth = 0

    def blob(self, name: Any) -> Any:
        """Return bytes that were stored beside the JSON."""
        raise NotImplementedError

    def get(self, node: Any) -> Any:
        if type(node) not in (list, dict):
            return node
        if self._depth == _DEEPEST_JSON:
            raise ValueError(f"it is nested deeper than {_DEEPEST_JSON} levels")
        self._depth += 1
        try:
            if type(node) is list:
                return [self.get(item) for item in node]
            tag = next(iter(node), "")
            if not tag.startswith("$"):
                return {key: self.get(value) for key, value in node.items()}
            reader = self.readers.get(tag)
            if reader is None or len(node) != 1:
                raise ValueError(f"this version of trainkit knows no type {tag!r}")
            return reader(self, node[tag])
        finally:
            self._depth -= 1

    def get_pairs(self, node: Any) -> dict[Any, Any]:
        """Return the dict of a list of pairs, or of an object."""
        pairs = {key: self.get(node[key]) for key in node} if type(node) is dict else {}
        for key, value in node if type(node) is list else ():
            pairs[self.get(key)] = self.get(value)
        if len(pairs) != len(node):
            raise ValueError("a dict has one key twice")
        return pairs

    def get_sequence(self, node: Any) -> list[Any]:
        if type(node) is not list:
            raise ValueError(f"a list is expected, but there is a {type(node).__name__}")
        return [self.get(item) for item in node]

    def get_array(self, node: Any) -> Any:
        import numpy

        text, shape, data = node
        if _NUMPY_DTYPE.fullmatch(text) is None:
            raise ValueError(f"there is no dtype {text!r}")
        dtype = numpy.dtype(text)
        content = bytearray(self.get(data))  # a copy that can be written to
        if not dtype.hasobject and dtype.itemsize:
            return numpy.frombuffer(content, dtype).reshape(shape)
        if dtype.hasobject or content:
            raise ValueError(f"there are no bytes of dtype {dtype}")
        return numpy.zeros(shape, dtype)  # empty strings, which have no bytes at all

    def get_dtype(self, name: Any) -> Any:
        import torch

        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there is no dtype {name!r}")
        return dtype

    def _get_float(self, text: Any) -> float:
        if text in ("nan", "inf", "-inf"):
            return float(text)
        value: float = struct.unpack(">d", bytes.fromhex(text))[0]
        return value

    def _get_defaultdict(self, node: Any) -> defaultdict[Any, Any]:
        name, pairs = node
        return defaultdict(None if name is None else _FACTORIES[name], self.get_pairs(pairs))

    def _get_timedelta(self, node: Any) -> timedelta:
        days, seconds, microseconds = self.get_sequence(node)
        return timedelta(days, seconds, microseconds)

    def _get_complex(self, node: Any) -> complex:
        real, imaginary = self.get_sequence(node)
        return complex(real, imaginary)

    def _get_size(self, sizes: Any) -> Any:
        import torch

        return torch.Size(sizes)

    def _get_device(self, name: Any) -> Any:
        import torch

        return torch.device(name)

    readers: ClassVar[dict[str, Callable[[Any, Any], Any]]] = {
        "$array": get_array,
        "$blob": lambda self, name: bytes(self.blob(name)),
        "$bytearray": lambda self, node: bytearray(self.get(node)),
        "$bytes": lambda _, text: base64.b64decode(text.encode("ascii"), validate=True),
        "$complex": _get_complex,
        "$deque": lambda self, node: deque(self.get_sequence(node[1]), node[0]),
        "$counter": lambda self, node: Counter(self.get_pairs(node)),
        "$defaultdict": _get_defaultdict,
        "$device": _get_device,
        "$dict": get_pairs,
        "$dtype": get_dtype,
        "$float": _get_float,
        "$frozenset": lambda self, node: frozenset(self.get_sequence(node)),
        "$int": lambda _, text: int(text, 16),
        "$ordered": lambda self, node: OrderedDict(
            self.get_pairs(node.get("$dict", node) if type(node) is dict else node)
        ),
        "$scalar": lambda self, node: self.get_array(node)[()],
        "$set": lambda self, node: set(self.get_sequence(node)),
        "$size": _get_size,
        "$text": lambda _, text: bytes.fromhex(text).decode("utf-16-le", "surrogatepass"),
        "$timedelta": _get_timedelta,
        "$tuple": lambda self, node: tuple(self.get_sequence(node)),
    }
    """What reads each type by its tag; who inherits has more."""
