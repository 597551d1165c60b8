"""Strategies: where the model lives and how the processes share the work."""

from typing import TYPE_CHECKING, Any

from trainkit.strategies.ddp import DDP
from trainkit.strategies.single import SingleDevice
from trainkit.strategies.strategy import Strategy

if TYPE_CHECKING:
    from trainkit.strategies.fsdp import FSDP

__all__ = ["DDP", "FSDP", "SingleDevice", "Strategy"]


def __getattr__(name: str) -> Any:
    """Import FSDP where it is used: most runs need none of it (PEP 562)."""
    if name != "FSDP":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainkit.strategies.fsdp import FSDP

    return FSDP
