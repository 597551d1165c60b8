"""Where in the files of a checkpoint a tensor lies, in one piece or in shards."""

import math
from dataclasses import dataclass
from typing import Any, Self

from trainkit.checkpoint.format.shard_region import ShardRegion, check_tiling
from trainkit.checkpoint.format.tensor_file import SIZES

__all__ = ["StoredTensor"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the safetensors files of one or several parts.

    Args:
        name: What it is called in each of those files.
        dtype: One of `tensor_file.SIZES`.
        shape: Of the whole tensor.
        shards: The parts that hold it, and which region of it each one has.
        strides: How it lay in memory; None: row by row, as shards always do.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[tuple[str, ShardRegion], ...]
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Return the bytes of the whole tensor."""
        return math.prod(self.shape) * SIZES[self.dtype]

    def node(self) -> list[Any]:
        """Return what stands in a `$sharded` node."""
        shards = [[part, list(region.offsets), list(region.sizes)] for part, region in self.shards]
        return [self.name, self.dtype, list(self.shape), shards]

    @classmethod
    def parse(cls, node: Any) -> Self:
        """Return the tensor of a `$sharded` node.

        Raises:
            ValueError, TypeError: It is not what `node` returns, or its shards overlap, leave a
                gap or reach beyond the tensor.
        """
        name, dtype, shape, shards = node
        if type(name) is not str or dtype not in SIZES:
            raise ValueError(f"there is no tensor {name!r:.200} of the type {dtype!r:.50}")
        regions = tuple(ShardRegion(_whole(offsets), _whole(sizes)) for _, offsets, sizes in shards)
        parts = [part for part, _, _ in shards]
        if any(type(part) is not str for part in parts) or len(set(parts)) != len(parts):
            raise ValueError(f"`{name}`: its shards are not in parts of different names")
        try:
            check_tiling(_whole(shape), regions)
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from None
        return cls(name, dtype, _whole(shape), tuple(zip(parts, regions, strict=True)))


def _whole(numbers: Any) -> tuple[int, ...]:
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a size or an offset is no whole number from 0 on")
    return tuple(numbers)
