"""How the tensors that torch calls `DTensor` lie over the processes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.format.tensor_location import ShardRegion
from trainkit.lazy import ask

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


first_meshes: dict[Any, Any] = {}
"""Of meshes of which others hold the same, the processes of the first one; a strategy notes it."""


def is_sharded(value: Any) -> bool:
    """Return whether a value is a `DTensor`; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def held_part(tensor: "Tensor") -> tuple[slice, ...]:
    """Return the index of what this process holds of a tensor: all of a plain one, as `()`."""
    return ShardingSpec.of(tensor).region().index if is_sharded(tensor) else ()  # type: ignore[arg-type]


def local_part(tensor: "Tensor") -> "Tensor":
    """Return what this process holds of a tensor, sharing its memory; a plain one as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How a tensor is spread over a mesh of processes."""

    mesh: Any
    placements: tuple[Any, ...]  # for each dimension of the mesh, `Shard(dim)` or `Replicate()`
    shape: tuple[int, ...]  # of the whole tensor

    @classmethod
    def of(cls, tensor: "DTensor") -> "ShardingSpec":
        """Return the spec of a tensor.

        Raises:
            ValueError: A placement is none that a checkpoint can hold.
        """
        from torch.distributed.tensor import Replicate, Shard

        kinds = {type(placement) for placement in tensor.placements}
        made: type[ShardingSpec] = cls if kinds <= {Shard, Replicate} else ask("PiecedSpec")
        return made(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))

    def pieces(self) -> list[tuple[ShardRegion, tuple[slice, ...]]]:
        """Return each piece that this process holds, and its place in what lies here."""
        return [(self.region(), ())]

    def region(self) -> ShardRegion:
        """Return what this process holds; empty if it is not in the mesh."""
        at = self.mesh.get_coordinate()
        return (
            ShardRegion((0,) * len(self.shape), (0,) * len(self.shape))
            if at is None
            else self._regions(at)[0]
        )

    def is_first_copy(self) -> bool:
        """Return whether this process is the first of those that hold the same."""
        at, ranks = self.mesh.get_coordinate(), self.mesh.mesh
        is_first = bool((first_meshes.get(self.mesh, ranks) == ranks).all())
        return is_first and at is not None and self._is_first_copy(at)

    def owners(self) -> Iterator[tuple[int, int, ShardRegion]]:
        """Yield who has which piece, by its number there; each once, without the empty ones."""
        ranks = first_meshes.get(self.mesh, self.mesh.mesh)
        for at in product(*(range(size) for size in self.mesh.shape)):
            for number, region in enumerate(self._regions(at)):
                if self._is_first_copy(at) and region.volume:
                    yield int(ranks[at]), number, region

    def wrap(self, local: "Tensor") -> "DTensor":
        """Return the sharded tensor of whose region this process holds all, as `local`."""
        import torch
        from torch.distributed.tensor import DTensor

        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=stride,
        )

    def cut(self, whole: "Tensor") -> "DTensor":
        """Return the sharded tensor of one that this process holds completely."""
        return self.wrap(whole[self.region().index].clone())

    def _is_first_copy(self, coords: Any) -> bool:
        return all(coords[dim] == 0 for dim, p in enumerate(self.placements) if p.is_replicate())

    def _regions(self, coords: Any) -> list[ShardRegion]:
        """Return what the process at these coordinates of the mesh holds."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for index, count, placement in zip(coords, self.mesh.shape, self.placements, strict=True):
            if placement.is_shard():
                dim = placement.dim
                share = -(-sizes[dim] // count)
                begin = min(index * share, sizes[dim])
                offsets[dim] += begin
                sizes[dim] = min(share, sizes[dim] - begin)
        return [ShardRegion(tuple(offsets), tuple(sizes))]
