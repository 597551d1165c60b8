"""What a loader is prepared for."""

from dataclasses import dataclass

import torch

from trainkit.distributed.active_batches import ActiveLoaders
from trainkit.distributed.processes import Processes

__all__ = ["LoaderContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderContext:
    """What a loader is prepared for.

    Args:
        device: Where the batches go.
        seed: The seed of the run, or of evaluation.
        trains: Training's rules or evaluation's (epochs, `set_epoch`, `drop_last`).
        split_batches: Whether the loader's batch size is that of all processes together.
        sample_seeding: Whether data sets that may draw random numbers run under keys.
        active: Told which batch is under way; None where nobody asks.
        may_be_empty: Whether training's rules hold, but an epoch may have no step.
    """

    processes: Processes
    device: torch.device
    seed: int
    trains: bool
    split_batches: bool = False
    sample_seeding: bool = True
    active: ActiveLoaders | None = None
    may_be_empty: bool = False
