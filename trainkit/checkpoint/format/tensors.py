"""Tensors as bytes and back, and which of them share memory; torch is imported when asked for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.format.tensor_file import Piece, is_dense, kept
from trainkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip
_FILE_NAMES = {f"torch.{torch}": name for name, torch in _TORCH_NAMES.items()}


def refused_tensor(value: "Tensor") -> str | None:
    """Return why a tensor cannot be stored, or None."""
    import torch

    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(value)
        return f"is a `{kind.__module__}.{kind.__qualname__}`; store plain tensors instead"
    if value.is_nested or value.layout is not torch.strided:
        return f"is a tensor of layout {value.layout}; store `to_dense()` of it instead"
    if value.is_quantized or value.is_meta:
        return "is a quantized tensor, or one without values on the device `meta`"
    return None


def file_dtype(dtype: Any) -> str:
    """Return what safetensors calls a dtype of torch.

    Raises:
        ValueError: It has no name for it.
    """
    name = _FILE_NAMES.get(str(dtype))
    if name is None:
        raise ValueError(f"is of the dtype {dtype}, which safetensors lacks")
    return name


def tensor_piece(value: "Tensor", name: str) -> tuple[Piece, dict[str, Any]]:
    """Return what is written of a tensor, and the node of the tree that refers to it.

    A dtype that safetensors does not have is stored as bytes, and named in the tree.
    """
    dtype, strides = _FILE_NAMES.get(str(value.dtype)), kept_strides(value)
    if dtype is not None:
        piece = Piece(dtype, tuple(value.shape), lambda: _bytes_of(value), strides)
        return piece, {"$tensor": name}
    size = value.numel() * value.element_size()
    raw = [name, str(value.dtype).removeprefix("torch."), list(value.shape)]
    raw += [] if strides is None else [list(strides)]
    return Piece("U8", (size,), lambda: _bytes_of(value)), {"$raw": raw}


def _bytes_of(value: "Tensor") -> memoryview:
    from trainkit.basics.device import memory_of  # which imports torch

    return memory_of(value.detach().resolve_conj().resolve_neg().cpu().contiguous())


def kept_strides(value: "Tensor") -> tuple[int, ...] | None:
    """Return the strides of a tensor that lies densely, but not row by row; None for others."""
    return kept(value.shape, value.stride())


def with_strides(value: "Tensor", strides: tuple[int, ...]) -> "Tensor":
    """Return a copy of a tensor that lies in memory as the strides say."""
    import torch

    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def empty(dtype: str, shape: tuple[int, ...]) -> "Tensor":
    """Return a tensor to be filled, of a dtype by its name in safetensors.

    Raises:
        ValueError: No tensor can have this shape.
    """
    import torch

    try:
        return torch.empty(shape, dtype=getattr(torch, _TORCH_NAMES[dtype]))
    except (OverflowError, RuntimeError, TypeError) as error:
        raise ValueError(f"no tensor can have the shape {shape}") from error


@dataclass(slots=True)
class _Seen:
    """A tensor that is to be written, and the nodes that refer to it."""

    value: "Tensor"
    name: str
    nodes: list[dict[str, Any]]
    begin: int  # bytes, in its storage
    end: int
    covers: bool  # each of its bytes once: others can be views of it


def _identity(value: "Tensor") -> tuple[Any, ...]:
    """Return what two tensors have in common that are the same memory seen alike."""
    storage = (str(value.device), value.untyped_storage().data_ptr())
    flipped = (value.is_conj(), value.is_neg())  # bits that the memory does not show
    shape, offset = tuple(value.shape), value.storage_offset()
    return (storage, offset, shape, value.stride(), value.dtype, flipped)


class Sharing:
    """Which tensors of a state lie in the same memory; each memory is written once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], _Seen] = {}

    def known(self, value: "Tensor") -> dict[str, Any] | None:
        """Return a node for a tensor that was added before under another name, or None."""
        seen = self._seen.get(_identity(value)) if value.numel() else None
        if seen is None:
            return None
        seen.nodes.append(dict(seen.nodes[0]))
        return seen.nodes[-1]

    def add(self, value: "Tensor", name: str, node: dict[str, Any]) -> dict[str, Any]:
        """Remember a tensor that is stored under `name`; return `node`."""
        if value.numel():
            steps = zip(value.shape, value.stride(), strict=True)
            begin = int(value.storage_offset())
            end = begin + int(sum((size - 1) * step for size, step in steps)) + 1
            dense = "$tensor" in node and is_dense(value.shape, value.stride())
            covers = dense and not (value.is_conj() or value.is_neg())
            width = value.element_size()
            seen = _Seen(value, name, [node], begin * width, end * width, covers)
            self._seen[_identity(value)] = seen
        return node

    def settle(self, pieces: dict[str, Piece], path: str) -> None:
        """Turn tensors that lie inside another one into views of it, and drop their pieces."""
        storages: dict[Any, list[_Seen]] = {}
        for (storage, *_), seen in self._seen.items():
            storages.setdefault(storage, []).append(seen)
        for group in storages.values():
            # The widest first; then whatever overlaps an earlier one must lie inside it.
            group.sort(key=lambda s: (s.begin - s.end, not s.covers, not s.value.is_contiguous()))
            kept: list[_Seen] = []
            for seen in group:
                others = [one for one in kept if one.begin < seen.end and seen.begin < one.end]
                if not others:
                    kept.append(seen)
                    continue
                base, value = others[0], seen.value
                inside = base.covers and base.begin <= seen.begin and seen.end <= base.end
                same = value.dtype == base.value.dtype and not (value.is_conj() or value.is_neg())
                if len(others) > 1 or not (inside and same):
                    raise CheckpointError(
                        f"In `{path}`, the tensors `{base.name}` and `{seen.name}` overlap in "
                        "memory, and neither contains the other. Return a `clone()` of one of "
                        "them."
                    )
                del pieces[seen.name]
                offset = (seen.begin - base.begin) // value.element_size()
                for node in seen.nodes:
                    node.clear()
                    node["$view"] = [base.name, [*value.shape], [*value.stride()], offset]
