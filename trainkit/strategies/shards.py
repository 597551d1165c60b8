"""The part of a sharded tensor that lies on this process."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainkit.checkpoint.resharding.sharding_spec import held_part

__all__ = ["local", "put"]


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharing its memory; plain tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put(full: Tensor, tensor: Tensor) -> None:
    """Copy this process's part of `full` into `tensor`."""
    with torch.no_grad():
        local(tensor).copy_(full[held_part(tensor)])
