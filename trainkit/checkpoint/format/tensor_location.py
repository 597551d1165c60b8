"""Where in the files of a checkpoint a tensor lies, in one piece or in shards; no torch needed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from operator import mul
from typing import Any, Self

from trainkit.checkpoint.format.tensor_file import SIZES, row_major


@dataclass(frozen=True, slots=True)
class ShardRegion:
    """A rectangular part of a tensor: where it begins and how long it is in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """Return the region that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def volume(self) -> int:
        return math.prod(self.sizes)

    @property
    def index(self) -> tuple[slice, ...]:
        """Return what cuts the region out of the tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def common(self, other: "ShardRegion") -> "ShardRegion | None":
        """Return the elements that are in both; None if there are none."""
        begins, ends = [], []
        for mine, size, theirs, length in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            begins.append(max(mine, theirs))
            ends.append(min(mine + size, theirs + length))
            if begins[-1] >= ends[-1]:
                return None
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return ShardRegion(tuple(begins), sizes)


def runs(source: ShardRegion, target: ShardRegion) -> Iterator[tuple[int, int, int]]:
    """Yield what to copy from the memory of one region into that of another, row by row.

    Each run is (begin in the source, begin in the target, length), counted in elements; they are
    as long as can be, and in the order of the source.
    """
    common = source.common(target)
    if common is None:
        return
    last = max(0, len(common.sizes) - 1)  # the dimensions from here on are one run
    while last > 0 and common.sizes[last] == source.sizes[last] == target.sizes[last]:
        last -= 1
    length = math.prod(common.sizes[last:])
    steps = row_major(source.sizes), row_major(target.sizes)
    first = [
        sum(
            (c - o) * step
            for c, o, step in zip(common.offsets, region.offsets, steps_of, strict=True)
        )
        for region, steps_of in zip((source, target), steps, strict=True)
    ]
    for index in product(*(range(size) for size in common.sizes[:last])):
        moved = [sum(map(mul, index, steps_of)) for steps_of in steps]  # up to the dimension `last`
        yield first[0] + moved[0], first[1] + moved[1], length


@lru_cache(maxsize=256)  # the tensors of a model have few shapes
def check_tiling(shape: tuple[int, ...], regions: tuple[ShardRegion, ...]) -> None:
    """Check that regions hold every element of a tensor once.

    Raises:
        ValueError: They overlap, leave a gap, or reach beyond the tensor.
    """
    whole = ShardRegion.whole(shape)
    for region in regions:
        if len(region.sizes) != len(shape) or len(region.offsets) != len(shape):
            raise ValueError(f"a shard has {len(region.sizes)} dimensions, the tensor {len(shape)}")
        if region.volume == 0 or whole.common(region) != region:
            raise ValueError(
                f"a shard at {region.offsets} of sizes {region.sizes} is not in {shape}"
            )
    for one, other in combinations(regions, 2):
        if one.common(other) is not None:
            raise ValueError(f"the shards at {one.offsets} and {other.offsets} overlap")
    if sum(region.volume for region in regions) != whole.volume:
        raise ValueError("its shards leave a gap")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the safetensors files of one or several parts."""

    name: str  # in each of those files
    dtype: str  # one of `tensor_file.SIZES`
    shape: tuple[int, ...]  # of the whole tensor
    shards: tuple[tuple[str, ShardRegion], ...]  # the parts that hold it, and what of it each has
    strides: tuple[int, ...] | None = None  # how it lay in memory; None: row by row, as shards do

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
