"""Write and read the safetensors format as a stream, with its digest; no torch needed.

The official reader checks the same things. This one reads each tensor straight into its own
memory while hashing, so that what is used is what was hashed, and nothing is held twice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from trainkit.checkpoint.format import strict_json
from trainkit.checkpoint.forms import check_form, one_of
from trainkit.checkpoint.io.reading import HashedFile


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie row by row."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether strides give each element a place of its own, and leave none free.

    Nothing is at stake in dimensions of size 1. An empty tensor has no elements to place.
    """
    contiguous = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if step != contiguous and size != 1:
            return False
        contiguous *= size
    return contiguous > 0


def kept(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides that a checkpoint must keep; None where it reads row by row."""
    steps = zip(strides, row_major(shape), shape, strict=True)
    differs = any(step != plain and size != 1 for step, plain, size in steps)
    return tuple(strides) if differs and is_dense(shape, strides) else None


def check_strides(name: Any, shape: Sequence[int], strides: Any) -> None:
    """Check strides that were read from a file, of a tensor of that name.

    Raises:
        ValueError: They are not what `kept` returns: a tensor with them would show memory that
            is not its own, or one place twice.
    """
    numbers = type(strides) is list and all(type(s) is int and 0 <= s < 1 << 63 for s in strides)
    if not numbers or len(strides) != len(shape) or not is_dense(shape, strides):
        raise ValueError(
            f"`{name}` of shape {list(shape)} cannot have the strides {strides!r:.200}"
        )


LARGEST_HEADER = 100_000_000  # bytes; what the official reader accepts
_MOST_TENSORS = 1_000_000
_METADATA = "__metadata__"
_STRIDES = "strides"  # in the metadata

SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of one element, by the format's name of its type."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor to write."""

    dtype: str  # one of `SIZES`
    shape: tuple[int, ...]
    data: Callable[[], memoryview]  # returns its bytes row by row; called when they are written
    strides: tuple[int, ...] | None = None  # how it lies in memory; None: row by row too

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return math.prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor stands: bytes `begin` to `end` after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    strides: tuple[int, ...] | None = None  # how it lay in memory; None: as it stands in the file


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    size: int  # bytes in front of the first tensor
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]  # by name, in the order in which the header names them


def encode_header(pieces: Mapping[str, Piece], metadata: Mapping[str, str]) -> bytes:
    """Return what stands in front of the tensors; it names them in the order of `pieces`."""
    begins, position = {}, 0
    for name in _file_order(pieces):
        begins[name] = position
        position += pieces[name].size
    strides = {name: list(piece.strides) for name, piece in pieces.items() if piece.strides}
    of_strides = {_STRIDES: strict_json.dump(strides).decode()} if strides else {}
    header: dict[str, Any] = {_METADATA: {**metadata, **of_strides}}
    for name, piece in pieces.items():
        offsets = [begins[name], begins[name] + piece.size]
        header[name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": offsets}
    text = strict_json.dump(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def chunks(pieces: Mapping[str, Piece], header: bytes) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: its header, then one tensor after the other."""
    yield header
    for name in _file_order(pieces):
        yield pieces[name].data()


def _file_order(pieces: Mapping[str, Piece]) -> list[str]:
    """Return the names in the order of the bytes: large elements first, so all are aligned."""
    return sorted(pieces, key=lambda name: -SIZES[pieces[name].dtype])


def read_header(file: HashedFile) -> Header:
    """Read the header of a file from its beginning, and check it.

    Every byte after it belongs to exactly one tensor, and each has as many as its shape needs.
    """
    if file.size < 8:
        raise file.broken(f"{file.size} bytes are too few for a safetensors file")
    length = int.from_bytes(file.read(8), "little")
    if length > min(LARGEST_HEADER, file.size - 8):
        raise file.broken(f"its header cannot have {length} bytes")
    try:
        return _checked(strict_json.parse(file.read(length)), 8 + length, file.size)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise file.broken(f"its header is wrong: {error}") from error


def _checked(found: Any, header_size: int, file_size: int) -> Header:
    check_form(found, {})
    if len(found) > _MOST_TENSORS:
        raise ValueError(f"it names {len(found)} tensors, more than {_MOST_TENSORS}")
    metadata = found.pop(_METADATA, {})
    check_form(metadata, {str: str}, _METADATA)
    strides = strict_json.parse(metadata.get(_STRIDES, "{}").encode())
    check_form(strides, {str: [int]}, _STRIDES)
    tensors = {name: _tensor(name, found[name], strides.pop(name, None)) for name in found}
    if strides:
        raise ValueError(f"it has strides of {next(iter(strides))!r:.200}, but no such tensor")
    header = Header(header_size, metadata, tensors)
    bounds = [(0, 0), *sorted((info.begin, info.end) for info in tensors.values())]
    for (_, end), (begin, _) in pairwise(bounds):
        if begin != end:
            raise ValueError(f"byte {min(begin, end)} belongs to no tensor, or to two")
    if bounds[-1][1] != file_size - header_size:
        raise ValueError(f"tensors end at {bounds[-1][1]} of {file_size - header_size} bytes")
    return header


_INFO = {"dtype": one_of(*SIZES), "shape": [int], "data_offsets": (int, int)}


def _tensor(name: str, info: Any, strides: Any) -> TensorInfo:
    check_form(info, _INFO, name)
    (begin, end), shape = info["data_offsets"], info["shape"]
    if len(shape) > 64:
        raise ValueError(f"a tensor has {len(shape)} dimensions")
    if math.prod(shape) * SIZES[info["dtype"]] != end - begin:
        raise ValueError(f"{end - begin} bytes cannot be {shape} of {info['dtype']}")
    if strides is not None:
        check_strides(name, shape, strides)
        strides = tuple(strides)
    return TensorInfo(info["dtype"], tuple(shape), begin, end, strides)
