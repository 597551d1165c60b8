"""Data: loaders shared out over the processes, resumable, each sample once (rules 12-19)."""

from trainkit.data.batch_sources import presharded
from trainkit.data.loader import PreparedLoader
from trainkit.data.prepare import evaluation_loader, training_loader
from trainkit.data.window import MicroBatch, Window
from trainkit.distributed.active_batches import ActiveLoaders, BatchInfo

__all__ = [
    "ActiveLoaders",
    "BatchInfo",
    "MicroBatch",
    "PreparedLoader",
    "Window",
    "evaluation_loader",
    "presharded",
    "training_loader",
]
