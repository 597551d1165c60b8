"""Which file of an export holds which tensor, and the names that `from_pretrained` reads."""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainkit.checkpoint.format import strict_json, tensor_file
from trainkit.checkpoint.format.tensor_file import LARGEST_HEADER, SIZES, Piece
from trainkit.checkpoint.format.tensors import tensor_piece
from trainkit.checkpoint.io import files
from trainkit.errors import ConfigError
from trainkit.types import Size

_METADATA = {"format": "pt"}  # which readers of transformers ask for

MODEL, ADAPTER = ("model", "pytorch_model"), ("adapter_model", "adapter_model")
"""Names of files without what follows: as safetensors, and as pickles."""
_SUFFIXES = {True: ".safetensors", False: ".bin"}
_WEIGHTS = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5,}-of-\d{5,})?\.bin|pytorch_model\.bin\.index\.json"
    r"|adapter_model\.(safetensors|bin)|adapter_config\.json"
)
_PER_PICKLED_TENSOR = 1024  # bytes that a `.bin` file spends on names, places and alignment


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of an export.

    Args:
        files: Name of each file of tensors to the names of the tensors in it.
        size: Bytes of all tensors.
        index: Name of the file that says where each tensor is; None for a single file.
    """

    files: dict[str, list[str]]
    size: int
    index: str | None

    @property
    def entry(self) -> str:
        """Return the file that readers open first."""
        return self.index or next(iter(self.files))

    def encode_index(self) -> bytes:
        """Return the content of the index."""
        weight_map = {name: file for file, names in self.files.items() for name in names}
        body = {"metadata": {"total_size": self.size}, "weight_map": weight_map}
        return strict_json.dump(body, indent=2) + b"\n"


def lay_out(
    pieces: Mapping[str, Piece], limit: int, *, safe: bool, stems: tuple[str, str] = MODEL
) -> Layout:
    """Share tensors out over files, in their order.

    A tensor that alone is above the limit gets a file of its own, with a warning.

    Args:
        limit: Largest size of a file in bytes, its header included.
        safe: Safetensors, not torch's own files.
    """
    base = (
        8 + len(strict_json.dump({"__metadata__": _METADATA})) + 8 if safe else _PER_PICKLED_TENSOR
    )
    groups: list[list[str]] = [[]]
    used = heads = base
    for name, piece in pieces.items():
        head = _PER_PICKLED_TENSOR + len(name)
        if safe:  # what it takes of the header at most
            entry = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [10**15] * 2}
            head = len(strict_json.dump({name: entry}))
        if base + head + piece.size > limit:
            warnings.warn(
                f"`{name}` alone has {piece.size} bytes, more than `max_shard_size` allows "
                f"({limit}): its file will be larger.",
                stacklevel=2,
            )
        if groups[-1] and (used + head + piece.size > limit or heads + head > LARGEST_HEADER):
            groups.append([])
            used = heads = base
        groups[-1].append(name)
        used += head + piece.size
        heads += head
    for group in groups:  # in the order in which the bytes will stand
        group.sort(key=lambda name: -SIZES[pieces[name].dtype])
    size = sum(piece.size for piece in pieces.values())
    stem, suffix = stems[not safe], _SUFFIXES[safe]
    if len(groups) == 1:
        return Layout({f"{stem}{suffix}": groups[0]}, size, None)
    files = {
        f"{stem}-{number:05d}-of-{len(groups):05d}{suffix}": group
        for number, group in enumerate(groups, 1)
    }
    return Layout(files, size, f"{stem}{suffix}.index.json")


def weight_piece(name: str, like: Tensor, read: Callable[[], Tensor] | None = None) -> Piece:
    """Return a tensor as it will be written.

    Args:
        like: Has its shape and dtype.
        read: Returns all of the tensor when it is written; None: `like` is the tensor.
    """
    piece, node = tensor_piece(like, name)
    if "$tensor" not in node or str(like.layout) != "torch.strided":
        raise ConfigError(
            f"`{name}` is a tensor of dtype {like.dtype} and layout {like.layout}, which files of "
            "weights cannot hold. Convert it first."
        )
    get = read or (lambda: like)
    return Piece(piece.dtype, piece.shape, lambda: tensor_piece(get(), name)[0].data())


def write_weights(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Write a safetensors file, one tensor in memory at a time."""
    header = tensor_file.encode_header(pieces, _METADATA)
    files.write_file(path, tensor_file.chunks(pieces, header))


def is_weights(name: str) -> bool:
    """Return whether a file of this name belongs to an export's weights."""
    return _WEIGHTS.fullmatch(name) is not None


_FORM = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(I?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(size: Size, name: str, least: int = 1) -> int:
    """Return a size in bytes.

    Args:
        size: A number of bytes, or text such as "5GB" (10**9 bytes) or "1GiB" (2**30 bytes).
        least: Bytes that it must have.
    """
    if type(size) is int and size >= least:
        return size
    match = _FORM.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        number, prefix, binary = match.groups()
        value = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
        if value >= least and not (binary and not prefix):
            return value
    raise ConfigError(
        f'`{name}` must be a size such as "5GB", "500MB" or "1GiB", or a number of bytes from '
        f"{least} on, but is {size!r}."
    )
