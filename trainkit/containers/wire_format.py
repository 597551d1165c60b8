"""Turn values into bytes and back, exactly, without pickle (rule 28).

Holds None, booleans, numbers, text, bytes, lists, tuples, sets, dictionaries (also ordered,
default and counting ones, with any keys), named tuples, data classes by field, mappings of
transformers, torch tensors and NumPy arrays and scalars. Types are kept; classes are looked up
among the modules already imported, never imported. Two references to one object become two.
"""

import math
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.basics.device import memory_of
from trainkit.containers import tree
from trainkit.errors import DistributedError

__all__ = ["Unencodable", "decode", "encode"]

_DEEPEST = 100  # levels of nesting; a value that contains itself is deeper than any

_COUNT = struct.Struct("<Q")
_INT64 = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_COMPLEX = struct.Struct("<dd")


class Unencodable(TypeError):
    """A value that cannot be turned into bytes.

    Args:
        reason: A full sentence on what is in the way and what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    @override
    def __str__(self) -> str:
        shown = self.path[::-1][:8]
        place = "".join(shown) + ("..." if len(self.path) > len(shown) else "")
        return f"At `value{place}`: {self.reason}" if place else self.reason


def encode(value: Any, *, allow_pickle: bool = False) -> bytes:
    """Return `value` as bytes.

    Args:
        value: What to encode. Tensors are copied from their device; their graph is left out.
        allow_pickle: Whether objects that have no form of their own are pickled.

    Raises:
        Unencodable: Something in `value` has no form, or is nested too deep.
    """
    encoder = _Encoder(allow_pickle)
    encoder.put(value)
    return b"".join(encoder.chunks)


def decode(data: bytes, *, device: torch.device | None = None, allow_pickle: bool = False) -> Any:
    """Return the value that `encode` turned into `data`.

    Args:
        data: What `encode` returned, here or in another process of the job.
        device: Where tensors go that were not on the CPU; the CPU by default.
        allow_pickle: Whether pickled objects in `data` are accepted.

    Raises:
        DistributedError: `data` is cut, damaged, or names a class that is not imported here.
    """
    decoder = _Decoder(memoryview(data), device, allow_pickle)
    value = decoder.get()
    if decoder.left:
        raise _damaged(f"{decoder.left} bytes follow the value")
    return value


class _Encoder:
    """Appends the form of each value to `chunks`: a tag of one byte, then its content."""

    def __init__(self, allow_pickle: bool) -> None:
        self.chunks: list[bytes | memoryview] = []
        self._allow_pickle = allow_pickle
        self._depth = 0

    def put(self, value: Any) -> None:
        """Append any value."""
        writer = _WRITERS.get(type(value))
        if writer is not None:
            writer(self, value)
        else:
            self._put_instance(value)

    def put_items(self, keys: Iterable[Any], values: Iterable[Any]) -> None:
        """Append values one level down; `keys` names them in errors."""
        if self._depth == _DEEPEST:
            raise Unencodable(
                f"It is nested deeper than {_DEEPEST} levels, or contains itself. Make it flatter."
            )
        self._depth += 1
        for key, value in zip(keys, values, strict=True):
            try:
                self.put(value)
            except Unencodable as error:
                error.path.append(f"[{key!r}]")
                raise
        self._depth -= 1

    def put_bytes(self, tag: bytes, data: bytes | memoryview) -> None:
        """Append a tag and bytes after their number."""
        self.chunks += (tag + _COUNT.pack(len(data)), data)

    def put_object(self, value: Any) -> None:
        """Append an object that `tree` takes apart."""
        name = tree.name_of(type(value)) if tree.is_named(type(value)) else None
        if name is None or tree.has_more_state(value):
            self.put_foreign(value)
            return
        keys, values = tree.parts(value)
        self.put_bytes(b"c", encode([name, *keys], allow_pickle=self._allow_pickle))
        self.put_items(keys, values)

    def _put_instance(self, value: Any) -> None:
        """Append what is known by a base class."""
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.nn.Parameter):
            _put_tensor(self, value.detach())
        elif numpy is not None and isinstance(value, numpy.generic):
            _put_array(self, b"g", value)
        elif numpy is not None and type(value) is numpy.ndarray:
            _put_array(self, b"a", value)
        else:
            self.put_object(value)

    def put_foreign(self, value: Any) -> None:
        """Append an object that has no form here, if it may be pickled."""
        cls = type(value)
        if not self._allow_pickle:
            raise Unencodable(
                f"A `{cls.__module__}.{cls.__qualname__}` cannot be sent to other processes "
                "without pickle. Turn it into numbers, text, tensors, lists, dicts or a data class "
                "defined in a module; or gather it with `use_gather_object=True`, which pickles."
            )
        import pickle

        try:
            self.put_bytes(b"P", pickle.dumps(value))
        except Exception as error:
            raise Unencodable(
                f"A `{cls.__module__}.{cls.__qualname__}` cannot be pickled: {error}. Turn it into "
                "numbers, text, tensors, lists or dicts."
            ) from error


def _put_int(encoder: _Encoder, value: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        encoder.chunks.append(b"i" + _INT64.pack(value))
    else:
        size = value.bit_length() // 8 + 1
        encoder.put_bytes(b"I", value.to_bytes(size, "little", signed=True))


def _put_text(encoder: _Encoder, value: str) -> None:
    encoder.put_bytes(b"s", value.encode("utf-8", "surrogatepass"))


def _sequence(tag: bytes) -> Callable[[_Encoder, Any], None]:
    def put(encoder: _Encoder, value: Any) -> None:
        encoder.chunks.append(tag + _COUNT.pack(len(value)))
        encoder.put_items(range(len(value)), value)

    return put


def _put_dict(encoder: _Encoder, value: dict[Any, Any]) -> None:
    encoder.chunks.append(b"d" + _COUNT.pack(len(value)))
    encoder.put_items(value, value)
    encoder.put_items(value, value.values())


def _put_defaultdict(encoder: _Encoder, value: defaultdict[Any, Any]) -> None:
    factory = value.default_factory
    name = tree.name_of(factory) if isinstance(factory, type) else None
    if factory is not None and name is None:
        encoder.put_foreign(value)
    else:
        encoder.put_bytes(b"D", (name or "").encode())
        _put_dict(encoder, value)


def _put_tensor(encoder: _Encoder, value: Tensor) -> None:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise Unencodable(
            f"A tensor of layout {value.layout} on {value.device} cannot be sent to other "
            "processes. Make it dense with `to_dense()` or `dequantize()`."
        )
    data = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    is_remote = value.device.type != "cpu"
    dtype = str(value.dtype).removeprefix("torch.")
    encoder.put_bytes(b"X" if is_remote else b"x", dtype.encode())
    _put_shape(encoder, value.shape)
    encoder.put_bytes(b"", memory_of(data))


def _put_array(encoder: _Encoder, tag: bytes, value: Any) -> None:
    dtype = value.dtype
    if dtype.kind == "V":
        encoder.put_foreign(value)
        return
    if dtype.hasobject:
        items = value.reshape(-1).tolist()
        encoder.chunks.append(b"o")
        _put_shape(encoder, value.shape)
        encoder.put_items(range(len(items)), items)
        return
    encoder.put_bytes(tag, dtype.str.encode())
    _put_shape(encoder, value.shape)
    encoder.put_bytes(b"", value.tobytes())


def _put_shape(encoder: _Encoder, shape: Iterable[int]) -> None:
    sizes = tuple(shape)
    encoder.chunks.append(struct.pack(f"<B{len(sizes)}Q", len(sizes), *sizes))


_WRITERS: dict[type, Callable[[_Encoder, Any], None]] = {
    type(None): lambda encoder, _: encoder.chunks.append(b"N"),
    bool: lambda encoder, value: encoder.chunks.append(b"T" if value else b"F"),
    int: _put_int,
    float: lambda encoder, value: encoder.chunks.append(b"f" + _FLOAT.pack(value)),
    complex: lambda encoder, value: encoder.chunks.append(
        b"j" + _COMPLEX.pack(value.real, value.imag)
    ),
    str: _put_text,
    bytes: lambda encoder, value: encoder.put_bytes(b"b", value),
    bytearray: lambda encoder, value: encoder.put_bytes(b"B", bytes(value)),
    list: _sequence(b"l"),
    tuple: _sequence(b"t"),
    torch.Size: _sequence(b"S"),
    set: _sequence(b"e"),
    frozenset: _sequence(b"z"),
    dict: _put_dict,
    defaultdict: _put_defaultdict,
    Tensor: _put_tensor,
}


def _damaged(what: str) -> DistributedError:
    return DistributedError(
        f"The bytes that came from another process are damaged: {what}. Make sure that all "
        "processes run the same version of trainkit."
    )


class _Decoder:
    """Reads values from bytes; every length is checked before it is trusted."""

    def __init__(self, data: memoryview, device: torch.device | None, allow_pickle: bool) -> None:
        self._data = data
        self._next = 0
        self._depth = 0
        self.device = device
        self.allow_pickle = allow_pickle

    @property
    def left(self) -> int:
        """Return the number of bytes that were not read."""
        return len(self._data) - self._next

    def get(self) -> Any:
        """Read one value."""
        tag = bytes(self.take(1))
        reader = _READERS.get(tag)
        if reader is None:
            raise _damaged(f"no value begins with {tag!r}")
        return reader(self)

    def take(self, size: int) -> memoryview:
        """Read `size` bytes."""
        if size > self.left:
            raise _damaged(f"{size} bytes should follow, but {self.left} are left")
        start, self._next = self._next, self._next + size
        return self._data[start : self._next]

    def take_counted(self) -> memoryview:
        """Read bytes after their number."""
        return self.take(int(_COUNT.unpack(self.take(8))[0]))

    def items(self, count: int | None = None) -> list[Any]:
        """Read that many values, or as many as a number in front says."""
        if count is None:
            count = int(_COUNT.unpack(self.take(8))[0])
        if count > self.left:
            raise _damaged(f"{count} values should follow, but {self.left} bytes are left")
        if self._depth == _DEEPEST:
            raise _damaged(f"values are nested deeper than {_DEEPEST} levels")
        self._depth += 1
        values = [self.get() for _ in range(count)]
        self._depth -= 1
        return values

    def shape(self) -> tuple[int, ...]:
        """Read the sizes of a tensor or array."""
        dimensions = self.take(1)[0]
        return struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))


def _get_dict(decoder: _Decoder) -> dict[Any, Any]:
    keys = decoder.items()
    return dict(zip(keys, decoder.items(len(keys)), strict=True))


def _get_defaultdict(decoder: _Decoder) -> defaultdict[Any, Any]:
    name = bytes(decoder.take_counted()).decode()
    factory = _class(name) if name else None
    decoder.take(1)
    return defaultdict(factory, _get_dict(decoder))


_decode_names = lru_cache(32)(decode)
"""Reads the names in front of an object; those of few kinds come often."""


def _get_object(decoder: _Decoder) -> Any:
    names = _decode_names(bytes(decoder.take_counted()), allow_pickle=decoder.allow_pickle)
    if type(names) is not list or not names or type(names[0]) is not str:
        raise _damaged("an object begins with no name")
    cls, values = _class(names[0]), decoder.items(len(names) - 1)
    if not tree.is_named(cls):
        raise _damaged(f"`{cls.__qualname__}` is not a container")
    return tree.build(cls, names[1:], values)


def _class(name: str) -> type:
    found = tree.class_named(name)
    if found is None:
        raise DistributedError(
            f"Another process sent a `{name.replace(':', '.')}`, but no module imported in this "
            "process has that class. Import it on all processes."
        )
    return found


def _get_tensor(decoder: _Decoder, remote: bool) -> Tensor:
    name = bytes(decoder.take_counted()).decode()
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise _damaged(f"there is no dtype {name!r}")
    shape = decoder.shape()
    raw = bytearray(decoder.take_counted())  # a copy: aligned, writable, its own
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise _damaged(f"{len(raw)} bytes cannot be {shape} of {dtype}")
    if raw:
        tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return tensor.to(decoder.device) if remote and decoder.device is not None else tensor


def _get_array(decoder: _Decoder) -> Any:
    import numpy

    dtype = numpy.dtype(bytes(decoder.take_counted()).decode())
    shape = decoder.shape()
    raw = bytearray(decoder.take_counted())
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise _damaged(f"{len(raw)} bytes cannot be {shape} of {dtype}")
    return numpy.frombuffer(raw, dtype=dtype).reshape(shape)


def _get_object_array(decoder: _Decoder) -> Any:
    import numpy

    shape = decoder.shape()
    items = decoder.items(math.prod(shape))
    return numpy.fromiter(items, object, len(items)).reshape(shape)


def _get_pickle(decoder: _Decoder) -> Any:
    if not decoder.allow_pickle:
        text = "Another process sent a pickled object, which runs code, and this call takes none."
        raise DistributedError(f"{text} Pass `use_gather_object=True` on all processes.")
    import pickle

    return pickle.loads(decoder.take_counted())


_READERS: dict[bytes, Callable[[_Decoder], Any]] = {
    b"N": lambda _: None,
    b"T": lambda _: True,
    b"F": lambda _: False,
    b"i": lambda decoder: _INT64.unpack(decoder.take(8))[0],
    b"I": lambda decoder: int.from_bytes(decoder.take_counted(), "little", signed=True),
    b"f": lambda decoder: _FLOAT.unpack(decoder.take(8))[0],
    b"j": lambda decoder: complex(*_COMPLEX.unpack(decoder.take(16))),
    b"s": lambda decoder: bytes(decoder.take_counted()).decode("utf-8", "surrogatepass"),
    b"b": lambda decoder: bytes(decoder.take_counted()),
    b"B": lambda decoder: bytearray(decoder.take_counted()),
    b"l": lambda decoder: decoder.items(),
    b"t": lambda decoder: tuple(decoder.items()),
    b"S": lambda decoder: torch.Size(decoder.items()),
    b"e": lambda decoder: set(decoder.items()),
    b"z": lambda decoder: frozenset(decoder.items()),
    b"d": _get_dict,
    b"D": _get_defaultdict,
    b"c": _get_object,
    b"x": lambda decoder: _get_tensor(decoder, remote=False),
    b"X": lambda decoder: _get_tensor(decoder, remote=True),
    b"a": _get_array,
    b"g": lambda decoder: _get_array(decoder)[()],
    b"o": _get_object_array,
    b"P": _get_pickle,
}
