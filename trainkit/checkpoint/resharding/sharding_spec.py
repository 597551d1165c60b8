"""How the tensors that torch calls `DTensor` lie over the processes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.format.shard_region import Box

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

__all__ = ["Placing", "is_sharded"]


def is_sharded(value: Any) -> bool:
    """Return whether a value is a `DTensor`; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


@dataclass(frozen=True, slots=True)
class Placing:
    """How a tensor is spread over a mesh of processes.

    Args:
        mesh: The `DeviceMesh`.
        placements: For each dimension of the mesh, `Shard(dim)` or `Replicate()`.
        shape: Of the whole tensor.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: "DTensor") -> "Placing":
        """Return the placing of a tensor.

        Raises:
            ValueError: A placement is neither `Shard` nor `Replicate`.
        """
        from torch.distributed.tensor import Replicate, Shard

        for placement in tensor.placements:
            if type(placement) not in (Shard, Replicate):
                raise ValueError(f"is placed by {placement}, not by `Shard` and `Replicate` alone")
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))

    def box(self) -> Box:
        """Return what this process holds; empty if it is not in the mesh."""
        at = self.mesh.get_coordinate()
        return Box((0,) * len(self.shape), (0,) * len(self.shape)) if at is None else self._box(at)

    def is_first_copy(self) -> bool:
        """Return whether this process is the first of those that hold the same."""
        at = self.mesh.get_coordinate()
        return at is not None and self._is_first_copy(at)

    def owners(self) -> Iterator[tuple[int, Box]]:
        """Yield which process has which box, each box once, without the empty ones."""
        for at in product(*(range(size) for size in self.mesh.shape)):
            box = self._box(at)
            if self._is_first_copy(at) and box.volume:
                yield int(self.mesh.mesh[at]), box

    def wrap(self, local: "Tensor") -> "DTensor":
        """Return the sharded tensor of which this process holds `local`."""
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
        box = self.box()
        for dim, (begin, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            whole = whole.narrow(dim, begin, size)
        return self.wrap(whole.clone())

    def _is_first_copy(self, at: Any) -> bool:
        return all(p.is_shard() or at[dim] == 0 for dim, p in enumerate(self.placements))

    def _box(self, at: Any) -> Box:
        """Return what the process at these coordinates of the mesh holds."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for index, count, placement in zip(at, self.mesh.shape, self.placements, strict=True):
            if placement.is_shard():
                dim = placement.dim
                share = -(-sizes[dim] // count)
                begin = min(index * share, sizes[dim])
                offsets[dim] += begin
                sizes[dim] = min(share, sizes[dim] - begin)
        return Box(tuple(offsets), tuple(sizes))
