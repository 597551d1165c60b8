"""The process group of one process alone, which torch's meshes need."""

import atexit

import torch
import torch.distributed
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]

from trainkit.basics.device import collective_backend


class _Alone:
    group: ProcessGroup | None = None


def join(device: torch.device) -> None:
    """Make the group, if this process has none yet."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            collective_backend(device), store=HashStore(), rank=0, world_size=1
        )
        _Alone.group = torch.distributed.group.WORLD
        atexit.register(leave)


def leave() -> None:
    """Destroy the group that `join` made; one that somebody else made stays."""
    if _Alone.group is not None and torch.distributed.group.WORLD is _Alone.group:
        torch.distributed.destroy_process_group()
    _Alone.group = None
    atexit.unregister(leave)
