"""Seed everything at once."""

import random

import torch

from trainkit.distributed.world import World

__all__ = ["set_seed"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch, on the CPU and on every accelerator.

    Args:
        seed: Equal on all processes.
        device_specific: Whether each process adds its number to the seed.
        deterministic: Whether torch may only use deterministic algorithms from now on.
    """
    if device_specific:
        seed += World.current().rank
    random.seed(seed)
    _seed_numpy(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _seed_numpy(seed: int) -> None:
    import numpy

    numpy.random.seed(seed)
