"""Data: loaders shared out over the processes, resumable, each sample once (rules 12-19)."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.data.batch_sources import presharded as presharded
    from trainkit.data.lengths import group_by_length as group_by_length
    from trainkit.data.loader import PreparedLoader as PreparedLoader
    from trainkit.data.packing import pack as pack
    from trainkit.data.prepare import (
        evaluation_loader as evaluation_loader,
        training_loader as training_loader,
    )
    from trainkit.data.window import MicroBatch as MicroBatch, Window as Window
    from trainkit.distributed.active_batches import (
        ActiveLoaders as ActiveLoaders,
        BatchInfo as BatchInfo,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
