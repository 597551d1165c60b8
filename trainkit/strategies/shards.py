"""The part of a sharded tensor that lies on this process."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

__all__ = ["local", "put", "rows"]


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharing its memory; plain tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows(tensor: Tensor) -> slice:
    """Return which rows (entries of dimension 0) of a tensor lie on this process.

    The rows are cut into equal consecutive runs; the last ones may be shorter, or empty.
    """
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):
                assert placement.dim == 0  # what `fully_shard` does
                mesh, count = tensor.device_mesh, tensor.shape[0]
                each = -(-count // mesh.size(axis))
                start = min(mesh.get_local_rank(axis) * each, count)
                return slice(start, min(start + each, count))
    return slice(None)


def put(full: Tensor, tensor: Tensor) -> None:
    """Copy this process's rows of `full` into `tensor`."""
    with torch.no_grad():
        part = full if tensor.ndim == 0 else full[rows(tensor)]
        local(tensor).copy_(part)
