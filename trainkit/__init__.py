"""A small trainer for PyTorch that can be trusted."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.accelerator import Accelerator
    from trainkit.callback import Callback
    from trainkit.errors import (
        CheckpointCorrupt,
        CheckpointError,
        ConfigError,
        DataError,
        DistributedError,
        NonFiniteError,
        TrainkitError,
    )
    from trainkit.run import FitResult, Run
    from trainkit.schedule import LRSchedule
    from trainkit.signals import Interrupted
    from trainkit.state import TrainState
    from trainkit.trainer import Trainer
    from trainkit.types import StepOutput, StepResult

__all__ = [
    "Accelerator",
    "Callback",
    "CheckpointCorrupt",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DistributedError",
    "FitResult",
    "Interrupted",
    "LRSchedule",
    "NonFiniteError",
    "Run",
    "StepOutput",
    "StepResult",
    "TrainState",
    "Trainer",
    "TrainkitError",
]

_HOME = {
    "Accelerator": "accelerator",
    "Callback": "callback",
    "CheckpointCorrupt": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "DistributedError": "errors",
    "FitResult": "run",
    "Interrupted": "signals",
    "LRSchedule": "schedule",
    "NonFiniteError": "errors",
    "Run": "run",
    "StepOutput": "types",
    "StepResult": "types",
    "TrainState": "state",
    "Trainer": "trainer",
    "TrainkitError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name == "__version__":
        return import_module("trainkit.state").VERSION
    if name not in _HOME:
        raise AttributeError(f"module `trainkit` has no attribute {name!r}")
    return getattr(import_module(f"trainkit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "callbacks", "metrics"])
