"""A small trainer for PyTorch that can be trusted."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.accelerator import Accelerator
    from trainkit.callback import Callback
    from trainkit.config import Watchdog
    from trainkit.errors import (
        CheckpointCorrupt,
        CheckpointError,
        ConfigError,
        DataError,
        DistributedError,
        NonFiniteError,
        TrainkitError,
    )
    from trainkit.export import (
        init_empty_weights,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from trainkit.own_loop.launcher import (
        notebook_launcher,
    )
    from trainkit.own_loop.loader import (
        skip_first_batches,
    )
    from trainkit.own_loop.logging import (
        get_logger,
    )
    from trainkit.own_loop.memory import (
        find_executable_batch_size,
        release_memory,
    )
    from trainkit.own_loop.operations import (
        PartialState,
        broadcast,
        broadcast_object_list,
        concatenate,
        extract_model_from_parallel,
        gather,
        gather_object,
        pad_across_processes,
        reduce,
        send_to_device,
        wait_for_everyone,
    )
    from trainkit.own_loop.seeds import (
        set_seed,
    )
    from trainkit.own_loop.settings import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        DistributedType,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProjectConfiguration,
    )
    from trainkit.own_loop.tracking import (
        GeneralTracker,
    )
    from trainkit.run import FitResult, Run
    from trainkit.schedule import LRSchedule
    from trainkit.signals import Interrupted
    from trainkit.state import TrainState
    from trainkit.trainer import Trainer
    from trainkit.types import StepOutput, StepResult

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "Callback",
    "CheckpointCorrupt",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedError",
    "DistributedType",
    "FitResult",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Interrupted",
    "LRSchedule",
    "NonFiniteError",
    "PartialState",
    "ProjectConfiguration",
    "Run",
    "StepOutput",
    "StepResult",
    "TrainState",
    "Trainer",
    "TrainkitError",
    "Watchdog",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "extract_model_from_parallel",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "init_empty_weights",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "wait_for_everyone",
]

_HOME = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "own_loop.settings",
    "Callback": "callback",
    "CheckpointCorrupt": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "DataLoaderConfiguration": "own_loop.settings",
    "DistributedDataParallelKwargs": "own_loop.settings",
    "DistributedError": "errors",
    "DistributedType": "own_loop.settings",
    "FitResult": "run",
    "GeneralTracker": "own_loop.tracking",
    "GradScalerKwargs": "own_loop.settings",
    "GradientAccumulationPlugin": "own_loop.settings",
    "InitProcessGroupKwargs": "own_loop.settings",
    "Interrupted": "signals",
    "LRSchedule": "schedule",
    "NonFiniteError": "errors",
    "PartialState": "own_loop.operations",
    "ProjectConfiguration": "own_loop.settings",
    "Run": "run",
    "StepOutput": "types",
    "StepResult": "types",
    "TrainState": "state",
    "Trainer": "trainer",
    "TrainkitError": "errors",
    "Watchdog": "config",
    "broadcast": "own_loop.operations",
    "broadcast_object_list": "own_loop.operations",
    "concatenate": "own_loop.operations",
    "extract_model_from_parallel": "own_loop.operations",
    "find_executable_batch_size": "own_loop.memory",
    "gather": "own_loop.operations",
    "gather_object": "own_loop.operations",
    "get_logger": "own_loop.logging",
    "init_empty_weights": "export",
    "load_checkpoint_and_dispatch": "export",
    "load_checkpoint_in_model": "export",
    "notebook_launcher": "own_loop.launcher",
    "pad_across_processes": "own_loop.operations",
    "reduce": "own_loop.operations",
    "release_memory": "own_loop.memory",
    "send_to_device": "own_loop.operations",
    "set_seed": "own_loop.seeds",
    "skip_first_batches": "own_loop.loader",
    "wait_for_everyone": "own_loop.operations",
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
