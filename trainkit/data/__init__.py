"""Data: loaders shared out over the processes, resumable, each sample once (rules 12-19)."""

from typing import TYPE_CHECKING

from trainkit.data.batch_sources import presharded
from trainkit.data.loader import PreparedLoader
from trainkit.data.prepare import evaluation_loader, training_loader
from trainkit.data.window import MicroBatch, Window
from trainkit.distributed.active_batches import ActiveLoaders, BatchInfo
from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.data.lengths import group_by_length as group_by_length
    from trainkit.data.packing import pack as pack

__all__ = [
    "ActiveLoaders",
    "BatchInfo",
    "MicroBatch",
    "PreparedLoader",
    "Window",
    "evaluation_loader",
    "group_by_length",
    "pack",
    "presharded",
    "training_loader",
]

__getattr__ = lazy_exports(__name__)[1]
