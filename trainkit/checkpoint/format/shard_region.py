"""Boxes: the parts of a tensor that single processes hold; no torch needed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from operator import mul
from typing import Self

from trainkit.checkpoint.format.strides import row_major

__all__ = ["Box", "check_tiling", "runs"]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: where it begins and how long it is in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Self:
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def volume(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)

    def common(self, other: "Box") -> "Box | None":
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
        return Box(tuple(begins), sizes)


def runs(source: Box, target: Box) -> Iterator[tuple[int, int, int]]:
    """Yield what to copy from the memory of one box into that of another, row by row.

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
        sum((c - o) * step for c, o, step in zip(common.offsets, box.offsets, of_box, strict=True))
        for box, of_box in zip((source, target), steps, strict=True)
    ]
    for index in product(*(range(size) for size in common.sizes[:last])):
        moved = [sum(map(mul, index, of_box)) for of_box in steps]  # up to the dimension `last`
        yield first[0] + moved[0], first[1] + moved[1], length


@lru_cache(maxsize=256)  # the tensors of a model have few shapes
def check_tiling(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> None:
    """Check that boxes hold every element of a tensor once.

    Raises:
        ValueError: They overlap, leave a gap, or reach beyond the tensor.
    """
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.sizes) != len(shape) or len(box.offsets) != len(shape):
            raise ValueError(f"a shard has {len(box.sizes)} dimensions, the tensor {len(shape)}")
        if box.volume == 0 or whole.common(box) != box:
            raise ValueError(f"a shard at {box.offsets} of sizes {box.sizes} is not in {shape}")
    for one, other in combinations(boxes, 2):
        if one.common(other) is not None:
            raise ValueError(f"the shards at {one.offsets} and {other.offsets} overlap")
    if sum(box.volume for box in boxes) != whole.volume:
        raise ValueError("its shards leave a gap")
