"""Strategies: where the model lives and how the processes share the work."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.strategies.ddp import DDP as DDP
    from trainkit.strategies.deepspeed import DeepSpeed as DeepSpeed
    from trainkit.strategies.fsdp import FSDP as FSDP
    from trainkit.strategies.model_parallel import ModelParallel as ModelParallel
    from trainkit.strategies.single import SingleDevice as SingleDevice
    from trainkit.strategies.strategy import Strategy as Strategy

__all__, __getattr__, __dir__ = lazy_exports(__name__)
