"""The state of a part as strict JSON and tensors, and back (rule 28).

Tensors, arrays and long byte strings go to the safetensors file; `json_form` says what becomes of
the rest. No class is looked up by a name from a file. Tensors that share memory stay so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from trainkit.checkpoint.format.names import tensor_name
from trainkit.checkpoint.format.tensor_file import Piece, check_strides
from trainkit.checkpoint.format.tensor_location import StoredTensor
from trainkit.checkpoint.format.tensors import (
    Sharing,
    kept_strides,
    refused_tensor,
    tensor_piece,
    with_strides,
)
from trainkit.containers import json_form
from trainkit.errors import CheckpointError

MOST_VALUES = 1 << 22  # in one state


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


def decode(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state.

    Raises:
        Exception: One of `json_form.MALFORMED`: `tree` is not of the form that `encode` writes, or
            `tensors` do not fit.
    """
    return _Decoder(tensors).get(tree)


class _Encoder(json_form.Encoder):
    """`pieces` collects what goes to the safetensors file."""

    def __init__(self, path: str, *, inline: bool = False) -> None:
        super().__init__(MOST_VALUES, inline=inline)
        self.pieces: dict[str, Piece] = {}
        self.sharing = Sharing()
        self.version = 1
        self.is_sharded = False
        self._path = path

    @override
    def refused(self, why: str) -> CheckpointError:
        steps = [_step(key) for key in self.keys]
        if len(steps) > 12:
            steps = [*steps[:8], "...", *steps[-2:]]
        return CheckpointError(
            f"`{self._path}{''.join(steps)}` {why}. A checkpoint holds tensors, arrays, numbers, "
            "text, bytes, and lists, tuples, sets and dicts of such; change what `state_dict` "
            "returns."
        )

    @override
    def store(self, size: int, read: Callable[[], memoryview]) -> str:
        name = tensor_name(self.keys, self.pieces)
        self.pieces[name] = Piece("U8", (size,), read)
        return name

    @override
    def put_tensor(self, value: Any) -> Any:
        why = refused_tensor(value)
        if self.is_inline:
            why = "is a tensor, which cannot stand here; make it a number or a list"
        if why is not None:
            raise self.refused(why)
        known = self.sharing.known(value)
        if known is not None:
            return known
        name = tensor_name(self.keys, self.pieces)
        self.pieces[name], node = tensor_piece(value, name)
        if kept_strides(value) is not None:
            self.version = 3
        return self.sharing.add(value, name, node)

    @override
    def put_other(self, value: Any) -> Any:
        if type(value) is StoredTensor:  # its shards are parts of their own
            self.version, self.is_sharded = max(self.version, 2), True
            return {"$sharded": value.node()}
        return super().put_other(value)


def _step(key: Any) -> str:
    is_name = type(key) is str and key.isidentifier()
    return f".{key}" if is_name else f"[{repr(key)[:80]}]"


class _Decoder(json_form.Decoder):
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__()
        self._tensors = tensors

    @override
    def blob(self, name: Any) -> Any:
        from trainkit.basics.device import memory_of  # which imports torch

        return memory_of(self._tensors[name].contiguous())

    def _get_raw(self, node: Any) -> Any:
        name, dtype, shape, *rest = node
        value = self._tensors[name].view(self.get_dtype(dtype)).reshape(shape)
        if not rest:
            return value
        (strides,) = rest
        check_strides(name, shape, strides)
        return with_strides(value, strides)

    def _get_view(self, node: Any) -> Any:
        name, shape, stride, offset = node
        # Bounds are checked by torch: a view never reaches beyond the memory of its tensor.
        return self._tensors[name].as_strided(shape, stride, offset)

    readers = json_form.Decoder.readers | {
        "$raw": _get_raw,
        "$tensor": lambda self, name: self._tensors[name],
        "$view": _get_view,
    }
