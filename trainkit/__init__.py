"""A trainer for PyTorch that can be trusted."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports, provide
from trainkit.version import __version__ as __version__

if TYPE_CHECKING:
    from trainkit.accelerator.accelerator import Accelerator as Accelerator
    from trainkit.accelerator.communication import (
        DDPCommunicationHookType as DDPCommunicationHookType,
    )
    from trainkit.accelerator.launcher import notebook_launcher as notebook_launcher
    from trainkit.accelerator.loader import skip_first_batches as skip_first_batches
    from trainkit.accelerator.local_sgd import LocalSGD as LocalSGD
    from trainkit.accelerator.logging import get_logger as get_logger
    from trainkit.accelerator.operations import (
        broadcast as broadcast,
        broadcast_object_list as broadcast_object_list,
        concatenate as concatenate,
        extract_model_from_parallel as extract_model_from_parallel,
        gather as gather,
        gather_object as gather_object,
        pad_across_processes as pad_across_processes,
        reduce as reduce,
        send_to_device as send_to_device,
        set_seed as set_seed,
        wait_for_everyone as wait_for_everyone,
    )
    from trainkit.accelerator.plugins import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        TorchDynamoPlugin as TorchDynamoPlugin,
    )
    from trainkit.accelerator.profiling import ProfileKwargs as ProfileKwargs
    from trainkit.accelerator.settings import (
        AutocastKwargs as AutocastKwargs,
        DataLoaderConfiguration as DataLoaderConfiguration,
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
        DistributedType as DistributedType,
        GradientAccumulationPlugin as GradientAccumulationPlugin,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        ProjectConfiguration as ProjectConfiguration,
    )
    from trainkit.accelerator.state import PartialState as PartialState
    from trainkit.basics.config import Watchdog as Watchdog
    from trainkit.basics.memory import (
        find_executable_batch_size as find_executable_batch_size,
        release_memory as release_memory,
    )
    from trainkit.basics.signals import Interrupted as Interrupted
    from trainkit.data.combined import Combined as Combined
    from trainkit.distributed.communicator import Communicator as Communicator
    from trainkit.errors import (
        CheckpointCorrupt as CheckpointCorrupt,
        CheckpointError as CheckpointError,
        CheckpointMissing as CheckpointMissing,
        ConfigError as ConfigError,
        DataError as DataError,
        DistributedError as DistributedError,
        NonFiniteError as NonFiniteError,
        TrainkitError as TrainkitError,
    )
    from trainkit.export import (
        init_empty_weights as init_empty_weights,
        load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
        load_checkpoint_in_model as load_checkpoint_in_model,
    )
    from trainkit.trackers.tracker import GeneralTracker as GeneralTracker
    from trainkit.trainer import Trainer as Trainer
    from trainkit.training.callback import Callback as Callback
    from trainkit.training.lr_schedule import LRSchedule as LRSchedule
    from trainkit.training.run import Run as Run
    from trainkit.training.run_parts import FitResult as FitResult, TrainState as TrainState
    from trainkit.types import (
        Alternating as Alternating,
        StepOutput as StepOutput,
        StepResult as StepResult,
    )

__all__, __getattr__, __dir__ = lazy_exports(__name__)
provide(
    {
        "Explanation": "trainkit.inspect.explain",
        "PiecedSpec": "trainkit.checkpoint.resharding.pieced_spec",
        "Replay": "trainkit.inspect.replay",
        "Mirror": "trainkit.storage.mirror",
        "as_metric": "trainkit.metrics",
        "courier": "trainkit.storage.machines",
        "default_callbacks": "trainkit.callbacks",
        "fetch": "trainkit.storage.addresses",
        "fetch_names": "trainkit.storage.addresses",
        "folder_of": "trainkit.storage.addresses",
        "hint_for": "trainkit.watch.hints",
        "on_this_machine": "trainkit.storage.machines",
        "recomputation": "trainkit.large_models.recomputation",
        "refuse_unknown": "trainkit.inspect.argument_names",
        "send_files": "trainkit.storage.addresses",
        "tell_of_failure": "trainkit.watch.job_watch",
        "start_watch": "trainkit.watch.job_watch",
        "tells_of_lost_peer": "trainkit.watch.hints",
    }
)
