"""What Accelerate's scripts read and set of an `Accelerator`: names over its parts."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.preparer import ConfiguredDDP
from trainkit.accelerator.profiling import ProfileKwargs
from trainkit.accelerator.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from trainkit.distributed.communicator import Communicator
from trainkit.strategies import Strategy
from trainkit.trackers.tracker import GeneralTracker


def _part(path: str) -> Any:
    """Return a property that is that of a part of the `Accelerator`; set, it is set there."""
    owner, _, name = path.rpartition(".")
    return property(
        attrgetter(path), lambda self, value: setattr(attrgetter(owner)(self), name, value)
    )


def _prepared(kind: str) -> Any:
    """Return a property that is what was prepared of a kind; scripts that load less set it."""
    return property(
        lambda self: getattr(self._registry, kind),
        lambda self, value: setattr(self._registry, kind, list(value)),
    )


class Attributes(Communicator):
    """The attributes of an `Accelerator`. What is set acts on what is prepared from then on."""

    fp8_recipe_handler = ao_recipe_handler = None
    te_recipe_handler = msamp_recipe_handler = None
    profile_handler: ProfileKwargs
    scaler_handler: GradScalerKwargs
    init_handler: InitProcessGroupKwargs

    _optimizers, _schedulers = _prepared("optimizers"), _prepared("schedulers")
    _models, _dataloaders = _prepared("models"), _prepared("loaders")
    _custom_objects = _prepared("objects")

    gradient_state: Accumulation = property(attrgetter("_accumulation"))  # type: ignore[assignment]
    """The windows: `sync_gradients`, `end_of_dataloader`, `remainder`, `num_steps`."""
    sync_gradients: bool = _part("_accumulation.sync_gradients")
    """Whether the present micro-batch is the last of its window."""
    step: int = _part("_accumulation.count")
    """Micro-batches that `accumulate` has begun since a loader's end ended a window."""
    scaler: torch.amp.GradScaler | None = _part("_gradients.scaler")
    """The loss scale of fp16; None without one."""
    parallelism_config: Any = _part("state.parallelism_config")
    """How many processes hold a model together; None where nobody said."""
    torch_device_mesh: Any = _part("state.device_mesh")
    """The mesh of `parallelism_config`; None without one."""
    distributed_type: DistributedType = _part("state.distributed_type")
    """How the job shares its work."""
    deepspeed_plugin: Any = _part("state.deepspeed_plugin")
    """How DeepSpeed shares a model out; None without it."""
    deepspeed_config: dict[str, Any] = _part("state.deepspeed_plugin.deepspeed_config")
    """The configuration of DeepSpeed, with what `prepare` has filled in."""
    mixed_precision: str = _part("state.mixed_precision")
    """ "no", "fp16", "bf16" or "fp8"."""
    project_configuration: ProjectConfiguration = property(attrgetter("_project"))  # type: ignore[assignment]
    """Where the project writes."""
    project_dir: Any = _part("_project.project_dir")
    """Folder of checkpoints and logs."""
    logging_dir: Any = _part("_project.logging_dir")
    """Folder of logs."""
    save_iteration: int = _part("_project.iteration")
    """Number of the next state that is named by itself."""
    log_with: list[Any] = _part("_trackers.wanted")
    """Names of trackers, and trackers, that `init_trackers` starts."""
    trackers: list[GeneralTracker] = _part("_trackers.at_work")
    """The trackers that are at work."""
    device_placement: bool = _part("_preparer.device_placement")
    """Whether models and batches move to the device."""
    step_scheduler_with_optimizer: bool = _part("_preparer.step_scheduler_with_optimizer")
    """Whether prepared schedulers follow the optimizers."""
    autocast_handler: AutocastKwargs = _part("_preparer.autocast")
    """How models run that are prepared from now on."""
    rng_types: list[str] = _part("_preparer.sharing.rng_types")
    """Generators that a pass takes from process 0."""
    split_batches: bool = _part("_preparer.sharing.configuration.split_batches")
    """Whether a batch size is that of all processes together."""
    even_batches: bool = _part("_preparer.sharing.configuration.even_batches")
    """Whether the last batches are filled up, so that all processes have as many."""
    dispatch_batches: bool | None = _part("_preparer.sharing.configuration.dispatch_batches")
    """Whether process 0 reads for all."""
    non_blocking: bool = _part("_preparer.sharing.configuration.non_blocking")
    """Whether batches move to the device without waiting."""
    use_seedable_sampler: bool = _part("_preparer.sharing.configuration.use_seedable_sampler")
    """Whether the order follows the epoch's number."""
    use_stateful_dataloader: bool = _part("_preparer.sharing.configuration.use_stateful_dataloader")
    """Whether loaders have a state."""
    dataloader_config: DataLoaderConfiguration = _part("_preparer.sharing.configuration")
    """How loaders are shared out."""

    _ddp: DistributedDataParallelKwargs
    _strategy: Strategy

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs:
        """How models are wrapped on several processes that are prepared from now on."""
        return self._ddp

    @ddp_handler.setter
    def ddp_handler(self, value: DistributedDataParallelKwargs) -> None:
        self._ddp = value
        if isinstance(self._strategy, ConfiguredDDP):
            self._strategy.settings = value

    @property
    def multi_device(self) -> bool:
        """Whether each of several processes has an accelerator, with the whole model on it."""
        return self.distributed_type.name.startswith("MULTI_") and self.device.type != "cpu"

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, which is always by FSDP2."""
        return self.distributed_type == DistributedType.FSDP

    def verify_device_map(self, model: nn.Module) -> bool:
        """Return whether a model, or one inside of it, is spread over several places."""
        return any(len(getattr(each, "hf_device_map", ())) > 1 for each in model.modules())

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Collection[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which tensors are the pieces of this process, also for the backward.

        With `cp_size` 1 it does nothing. Cut what the model is given, and labels that are shifted:
        the loss is that of the pieces then, which `backward` averages over all processes, and
        `reduce` over one process of each group.

        Args:
            buffers: They are cut in place, and put back at the end.
            buffer_seq_dims: Along which dimension each is cut.
            no_restore_buffers: Those that stay cut.
        """
        context: Any = self._strategy.context
        given = buffers or (), buffer_seq_dims or (), no_restore_buffers or ()
        cut: AbstractContextManager[None] = (
            nullcontext() if context is None else context.cut_buffers(*given)
        )
        return cut
