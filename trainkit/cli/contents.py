"""What a checkpoint holds, read without torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from trainkit.checkpoint import strict_json, tensor_file
from trainkit.checkpoint.manifest import Manifest
from trainkit.checkpoint.names import JSON_SUFFIX, part_of
from trainkit.checkpoint.opened import verify
from trainkit.checkpoint.reading import HashedFile, open_directory, open_file

__all__ = ["Contents", "TensorSummary", "leaves", "read_contents"]


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor as its file describes it; `digest` is that of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes
    digest: str


@dataclass(slots=True)
class Contents:
    """A verified checkpoint: tensors and other values by part and name."""

    manifest: Manifest
    tensors: dict[str, dict[str, TensorSummary]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_contents(path: Path) -> Contents:
    """Verify a checkpoint and return what it holds.

    Raises:
        CheckpointError: It is broken, or of a newer version of the format.
    """
    contents = Contents(verify(path))
    with open_directory(path) as directory:
        for name in contents.manifest.files:
            with open_file(directory, name, path) as file:
                if name.endswith(JSON_SUFFIX):
                    contents.values[part_of(name)] = _read_values(file)
                else:
                    contents.tensors[part_of(name)] = _read_tensors(file)
    return contents


def _read_values(file: HashedFile) -> dict[str, Any]:
    try:
        return dict(leaves(strict_json.parse(file.read(file.size))))
    except ValueError as error:
        raise file.broken(str(error)) from error


def _read_tensors(file: HashedFile) -> dict[str, TensorSummary]:
    header = tensor_file.read_header(file)
    found = {}
    for name, info in header.in_file_order():
        size = info.end - info.begin
        digest = xxhash.xxh3_128_hexdigest(file.read(size))
        found[name] = TensorSummary(info.dtype, info.shape, size, digest)
    return {name: found[name] for name in header.tensors}


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in a tree of JSON that holds nothing itself, with the path that leads there."""
    if type(node) is dict and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif type(node) is list and node:
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, node
