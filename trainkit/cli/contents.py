"""What a checkpoint holds, read without torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.checkpoint.checkpoint import verify
from trainkit.checkpoint.format import strict_json
from trainkit.checkpoint.format.codec import is_plain
from trainkit.checkpoint.format.manifest import Manifest
from trainkit.checkpoint.format.names import JSON_SUFFIX, TENSOR_SUFFIX, part_of
from trainkit.checkpoint.format.tensor_location import ShardRegion, StoredTensor
from trainkit.checkpoint.io.digests import xxh3_128_hexdigest
from trainkit.checkpoint.resharding.tensor_reader import TensorReader
from trainkit.errors import CheckpointCorrupt


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
    """Verify a checkpoint and return what it holds; sharded tensors as if they were whole.

    Raises:
        CheckpointError: It is broken, or of a newer version of the format.
    """
    contents = Contents(verify(path))
    files = contents.manifest.files
    reader = TensorReader(path, files)
    trees, tensors = _read_trees(reader, files, path)
    shards = {part for own in tensors.values() for t in own.values() for part, _ in t.shards}
    for part in sorted({part_of(name) for name in files} - shards):
        if part + TENSOR_SUFFIX in files:
            tensors[part] = reader.of_part(part) | tensors.get(part, {})
        if tensors.get(part):
            summaries = {name: _summary(reader, one) for name, one in tensors[part].items()}
            contents.tensors[part] = summaries
        if part in trees and not is_plain(trees[part]):
            contents.values[part] = dict(leaves(trees[part]))
    return contents


def _read_trees(
    reader: TensorReader, files: Iterable[str], path: Path
) -> tuple[dict[str, Any], dict[str, dict[str, StoredTensor]]]:
    """Return the JSON of the parts, in which no tensor is sharded, and those that are."""
    trees: dict[str, Any] = {}
    sharded: dict[str, dict[str, StoredTensor]] = {}
    for name in files:
        if name.endswith(JSON_SUFFIX):
            try:
                trees[part_of(name)] = tree = strict_json.parse(reader.read_whole(name))
                sharded[part_of(name)] = dict(_take_sharded(tree))
            except (TypeError, ValueError) as error:
                text = f"`{name}`: trainkit did not write it so: {error}."
                raise CheckpointCorrupt(
                    f"The checkpoint `{path}` is broken: {text}", path=path, file=name
                ) from error
    return trees, sharded


def _take_sharded(node: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the sharded tensors of a tree, and make each node that of a tensor of one piece."""
    if type(node) is dict and "$sharded" in node:
        stored = StoredTensor.parse(node.pop("$sharded"))
        node["$tensor"] = stored.name
        yield stored.name, stored
    elif type(node) in (dict, list):
        for value in node.values() if type(node) is dict else node:
            yield from _take_sharded(value)


def _summary(reader: TensorReader, stored: StoredTensor) -> TensorSummary:
    whole = ShardRegion.whole(stored.shape)
    reader.check(stored, whole)
    content = bytearray(stored.size)
    reader.read([(stored, whole, memoryview(content))], hashed=False)
    digest = xxh3_128_hexdigest(content)
    return TensorSummary(stored.dtype, stored.shape, stored.size, digest)


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
