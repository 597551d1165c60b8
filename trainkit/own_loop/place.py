"""The place of this process, without making it join the others."""

import os

import torch.distributed

from trainkit.world import World

__all__ = ["present_place"]


def present_place() -> World:
    """Return the place in the process group, if there is one, else the launcher's."""
    group = torch.distributed
    if not group.is_available() or not group.is_initialized():
        return World.from_env()
    numbers = {"RANK": str(group.get_rank()), "WORLD_SIZE": str(group.get_world_size())}
    return World.from_env({**os.environ, **numbers})
