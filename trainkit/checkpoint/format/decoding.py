"""Turn the JSON of a part and its tensors back into the state that `codec.encode` took apart."""

import base64
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from trainkit.checkpoint.format.strides import check_strides
from trainkit.checkpoint.format.tensors import with_strides

__all__ = ["FACTORIES", "MALFORMED", "decode"]

MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What is raised where a file is not of the form that `codec` writes."""

FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)
}
"""What a `defaultdict` may make its values with."""

_DEEPEST = 256  # levels of JSON; a level of a state makes up to three
_NUMPY_DTYPE = re.compile(r"[<>|=]?[A-Za-z][0-9]*(\[[0-9]*[A-Za-z]+\])?")


def decode(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state.

    Args:
        tree: What `codec.encode` returned as `tree`, after strict JSON.
        tensors: The tensors by the names that `tree` uses.

    Raises:
        Exception: One of `MALFORMED`: `tree` is not of the form that `codec` writes, or
            `tensors` do not fit.
    """
    return _Decoder(tensors).get(tree)


class _Decoder:
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors
        self._depth = 0

    def get(self, node: Any) -> Any:
        """Return the value of any node."""
        if type(node) not in (list, dict):
            return node
        if self._depth == _DEEPEST:
            raise ValueError(f"it is nested deeper than {_DEEPEST} levels")
        self._depth += 1
        try:
            return self._get_container(node)
        finally:
            self._depth -= 1

    def get_pairs(self, node: Any) -> dict[Any, Any]:
        """Return the dict of a list of pairs, or of an object."""
        found = {key: self.get(node[key]) for key in node} if type(node) is dict else {}
        for key, value in node if type(node) is list else ():
            found[self.get(key)] = self.get(value)
        if len(found) != len(node):
            raise ValueError("a dict has one key twice")
        return found

    def get_sequence(self, node: Any) -> list[Any]:
        """Return the values of a list."""
        if type(node) is not list:
            raise ValueError(f"a list is expected, but there is a {type(node).__name__}")
        return [self.get(item) for item in node]

    def _get_container(self, node: Any) -> Any:
        if type(node) is list:
            return [self.get(item) for item in node]
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.get(value) for key, value in node.items()}
        reader = _READERS.get(tag)
        if reader is None or len(node) != 1:
            raise ValueError(f"this version of trainkit knows no type {tag!r}")
        return reader(self, node[tag])


def _get_float(_: _Decoder, text: Any) -> float:
    if text in ("nan", "inf", "-inf"):
        return float(text)
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _get_complex(decoder: _Decoder, node: Any) -> complex:
    real, imaginary = decoder.get_sequence(node)
    return complex(real, imaginary)


def _get_defaultdict(decoder: _Decoder, node: Any) -> defaultdict[Any, Any]:
    name, pairs = node
    return defaultdict(None if name is None else FACTORIES[name], decoder.get_pairs(pairs))


def _get_timedelta(decoder: _Decoder, node: Any) -> timedelta:
    days, seconds, microseconds = decoder.get_sequence(node)
    return timedelta(days, seconds, microseconds)


def _array(decoder: _Decoder, node: Any) -> Any:
    import numpy

    text, shape, data = node
    if _NUMPY_DTYPE.fullmatch(text) is None:
        raise ValueError(f"there is no dtype {text!r}")
    dtype = numpy.dtype(text)
    content = bytearray(decoder.get(data))  # a copy that can be written to
    if dtype.hasobject or dtype.itemsize == 0:
        return _without_bytes(dtype, shape, content)
    return numpy.frombuffer(content, dtype).reshape(shape)


def _blob(decoder: _Decoder, name: Any) -> bytes:
    from trainkit.basics.device import memory_of  # which imports torch

    return bytes(memory_of(decoder.tensors[name].contiguous()))


def _get_sharded(_: _Decoder, node: Any) -> Any:
    raise ValueError(f"a sharded tensor {str(node)[:80]} cannot stand here")


def _without_bytes(dtype: Any, shape: Any, content: bytearray) -> Any:
    """Return an array of empty strings, which have no bytes at all."""
    import numpy

    if dtype.hasobject or content:
        raise ValueError(f"there are no bytes of dtype {dtype}")
    return numpy.zeros(shape, dtype)


def _get_raw(decoder: _Decoder, node: Any) -> Any:
    name, dtype, shape, *rest = node
    value = decoder.tensors[name].view(_torch_dtype(dtype)).reshape(shape)
    if not rest:
        return value
    (strides,) = rest
    check_strides(name, shape, strides)
    return with_strides(value, strides)


def _get_view(decoder: _Decoder, node: Any) -> Any:
    name, shape, stride, offset = node
    # Bounds are checked by torch: a view never reaches beyond the memory of its tensor.
    return decoder.tensors[name].as_strided(shape, stride, offset)


def _torch_dtype(name: Any) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def _get_size(_: _Decoder, sizes: Any) -> Any:
    import torch

    return torch.Size(sizes)


def _get_device(_: _Decoder, name: Any) -> Any:
    import torch

    return torch.device(name)


_READERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$array": _array,
    "$blob": _blob,
    "$bytearray": lambda decoder, node: bytearray(decoder.get(node)),
    "$bytes": lambda _, text: base64.b64decode(text.encode("ascii"), validate=True),
    "$complex": _get_complex,
    "$counter": lambda decoder, node: Counter(decoder.get_pairs(node)),
    "$defaultdict": _get_defaultdict,
    "$device": _get_device,
    "$dict": lambda decoder, node: decoder.get_pairs(node),
    "$dtype": lambda _, name: _torch_dtype(name),
    "$float": _get_float,
    "$frozenset": lambda decoder, node: frozenset(decoder.get_sequence(node)),
    "$int": lambda _, text: int(text, 16),
    "$ordered": lambda decoder, node: OrderedDict(
        decoder.get_pairs(node.get("$dict", node) if type(node) is dict else node)
    ),
    "$raw": _get_raw,
    "$scalar": lambda decoder, node: _array(decoder, node)[()],
    "$sharded": _get_sharded,  # parts of a checkpoint name what they read of it instead
    "$set": lambda decoder, node: set(decoder.get_sequence(node)),
    "$size": _get_size,
    "$tensor": lambda decoder, name: decoder.tensors[name],
    "$text": lambda _, text: bytes.fromhex(text).decode("utf-16-le", "surrogatepass"),
    "$timedelta": _get_timedelta,
    "$tuple": lambda decoder, node: tuple(decoder.get_sequence(node)),
    "$view": _get_view,
}
