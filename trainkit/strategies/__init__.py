"""Strategies: where the model lives and how the processes share the work."""

from trainkit.strategies.ddp import DDP
from trainkit.strategies.single import SingleDevice
from trainkit.strategies.strategy import Strategy

__all__ = ["DDP", "SingleDevice", "Strategy"]
