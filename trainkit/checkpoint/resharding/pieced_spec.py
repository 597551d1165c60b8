"""How tensors lie that are cut over one dimension several times, or into several stretches."""

from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from trainkit.checkpoint.format.tensor_location import ShardRegion
from trainkit.checkpoint.resharding.sharding_spec import ShardingSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class PiecedSpec(ShardingSpec):
    """One with strided shards: of each of several parts of a dimension a process holds a part.

    Torch's `fully_shard` makes them of what `parallelize_module` has cut, and transformers of
    matrices that hold several, such as gate and up projection.
    """

    def __post_init__(self) -> None:
        for placement in self.placements:
            if not (placement.is_replicate() or hasattr(placement, "dim")):
                raise ValueError(f"is placed by {placement}, not by shards and `Replicate` alone")

    @override
    def pieces(self) -> list[tuple[ShardRegion, tuple[slice, ...]]]:
        return self._pieces(self.mesh.get_coordinate())

    @override
    def region(self) -> ShardRegion:
        """Return the smallest region with all that this process holds."""
        held = self._held(self.mesh.get_coordinate())
        ends = [(int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0) for own in held]
        return ShardRegion(tuple(b for b, _ in ends), tuple(e - b for b, e in ends))

    @override
    def wrap(self, local: "Tensor") -> "DTensor":
        for dim, indices in enumerate(self._held(self.mesh.get_coordinate())):
            if len(indices):
                local = local.index_select(dim, (indices - indices[0]).to(local.device))
        return ShardingSpec.wrap(self, local)

    @override
    def _regions(self, coords: Any) -> list[ShardRegion]:
        return [region for region, _ in self._pieces(coords)]

    def _pieces(self, coords: Any) -> list[tuple[ShardRegion, tuple[slice, ...]]]:
        pieces = []
        for stretches in product(*map(_stretches, self._held(coords))):
            begins, sizes, slices = zip(*stretches, strict=True)
            pieces.append((ShardRegion(begins, sizes), slices))
        return pieces

    def _held(self, coords: Any) -> "list[Tensor]":
        """Return the indices in each dimension of what a process holds, by its coordinates."""
        held = [torch.arange(0 if coords is None else size) for size in self.shape]
        cuts = zip(coords or (), self.mesh.shape, self.placements, strict=False)
        for index, count, placement in cuts:
            if not placement.is_replicate():
                parts = _cut(held[placement.dim], getattr(placement, "split_factor", 1))
                held[placement.dim] = torch.cat([_cut(part, count)[index] for part in parts])
        return held


def _cut(indices: "Tensor", count: int) -> "list[Tensor]":
    """Return equal parts; the last ones may be shorter."""
    share = -(-len(indices) // count)
    return [indices[share * number : share * (number + 1)] for number in range(count)]


def _stretches(indices: "Tensor") -> list[tuple[int, int, slice]]:
    """Return where consecutive indices begin, how many they are, and their place among all."""
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    bounds = [0, *breaks, len(indices)]
    first = indices.tolist() or [0]
    return [(first[b], e - b, slice(b, e)) for b, e in pairwise(bounds)]
