"""Training with sharded parameters: the same as `training`, by functions of their own."""

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.compare.training import Training

__all__ = ["Sharding"]


@dataclass(frozen=True, kw_only=True)
class Sharding(Training):
    """Trains with `fully_shard`, each block of the model for itself, or with what there is."""

    kind: ClassVar[str] = "sharding"
