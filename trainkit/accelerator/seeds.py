"""Seed everything at once."""

from contextlib import suppress

import torch

from trainkit.basics.rng import seed_host
from trainkit.distributed.world import World

with suppress(ModuleNotFoundError):
    import numpy  # noqa: F401  # else what imports it later would not be seeded


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch, on the CPU and on every accelerator.

    Args:
        seed: Equal on all processes.
        device_specific: Whether each process adds its number to the seed.
        deterministic: Whether torch may only use deterministic algorithms from now on.
    """
    if device_specific:
        seed += World.current().rank
    seed_host(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
