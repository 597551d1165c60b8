"""Puts the parts of an `Accelerator` together."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.join import Join

from trainkit.accelerator.accelerator_config import Wishes
from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.gradients import Gradients
from trainkit.accelerator.loader import Sharing
from trainkit.accelerator.preparer import ConfiguredDDP, Preparation, Registry
from trainkit.accelerator.settings import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from trainkit.accelerator.state_contents import StateContents
from trainkit.accelerator.state_directory import StateDirectory
from trainkit.accelerator.states import States
from trainkit.accelerator.tracking import GeneralTracker, make_trackers
from trainkit.distributed import Processes, run_on_all_or_main, run_on_main
from trainkit.distributed.active_batches import ActiveLoaders
from trainkit.errors import ConfigError
from trainkit.outputs import check_folder
from trainkit.precision import BF16, FP16, FP32, Precision
from trainkit.strategies import SingleDevice, Strategy

__all__ = ["OwnLoop"]

PRECISIONS: dict[str, type[Precision]] = {"no": FP32, "fp16": FP16, "bf16": BF16}


@dataclass
class OwnLoop:
    """The parts that an `Accelerator` passes its calls to.

    Args:
        wishes: The settings, checked.
        processes: The processes of the job.
        device: The device of this process.
        active: Tells which samples of a batch are real.
    """

    wishes: Wishes
    processes: Processes
    device: torch.device
    active: ActiveLoaders
    trackers: list[GeneralTracker] = field(default_factory=list)
    has_trigger: bool = False

    def __post_init__(self) -> None:
        wishes = self.wishes
        self.project, self.data = wishes.project, wishes.data
        if self.project.project_dir is not None:
            self._try_out(self.project.project_dir, "`Accelerator(project_dir=...)`")
        scaler: GradScalerKwargs = wishes.handler(GradScalerKwargs)
        self.precision = _precision(wishes.precision, scaler)
        self.precision.setup(self.device)
        self.strategy = wishes.strategy or self._choose_strategy()
        self.strategy.setup()
        self.registry = Registry()
        self.accumulation = Accumulation(wishes.accumulation)
        self.gradients = Gradients(
            self.accumulation, self.precision, self.strategy, scaled=scaler.enabled
        )
        self.gradients.models = self.registry.models
        sharing = Sharing(
            processes=self.processes,
            device=self.device if wishes.device_placement else torch.device("cpu"),
            configuration=self.data,
            rng_types=wishes.generators,
            active=self.active,
            accumulation=self.accumulation,
        )
        self.preparation = self._make_preparation(sharing)
        contents = StateContents(
            self.registry,
            self.strategy,
            self.gradients,
            self.accumulation,
            self.processes,
            self.device,
        )
        self.states = States(contents, StateDirectory(self.project, self.processes))

    def start_trackers(
        self, project_name: str, config: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> None:
        """Start the trackers that were asked for; on processes that do not track there are none."""
        place = self.project.logging_dir
        trackers = make_trackers(self.wishes.log_with, project_name, place, options)
        if place is not None and any(each.requires_logging_directory for each in trackers):
            self._try_out(Path(place) / project_name, "`init_trackers`")
        self.trackers = [
            tracker
            for tracker in trackers
            if self.processes.is_main or not tracker.main_process_only
        ]
        for tracker in self.trackers:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def _try_out(self, folder: str | Path, owner: str) -> None:
        """Raise, on all processes, where the main process cannot write to a folder."""
        run_on_main(self.processes, lambda: check_folder(Path(folder), owner))

    def tracker(self, name: str, unwrap: bool) -> Any:
        """Return a tracker, or what its library calls its run."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self.processes.is_main:
            return GeneralTracker(_blank=True)
        known = ", ".join(tracker.name for tracker in self.trackers) or "none"
        raise ConfigError(
            f"There is no tracker {name!r}, but {known}. Name it in `log_with`, and call "
            "`init_trackers` first."
        )

    def autocast(self, settings: AutocastKwargs | None) -> AbstractContextManager[object]:
        """Return autocast in the mixed precision, or a context that does nothing."""
        settings = settings or self.preparation.autocast
        if self.precision.dtype is None or not settings.enabled:
            return nullcontext()
        return torch.autocast(
            self.device.type, dtype=self.precision.dtype, cache_enabled=settings.cache_enabled
        )

    def unscale(self, optimizer: Any) -> None:
        """Make the gradients of a prepared optimizer, of a list of them, or of all final."""
        wanted = self.registry.optimizers if optimizer is None else optimizer
        for one in wanted if isinstance(wanted, list | tuple) else [wanted]:
            self.gradients.settle(getattr(one, "optimizer", one))

    @contextmanager
    def joined(self, models: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
        """Let processes with fewer batches shadow the collectives of the others."""
        loaders = self.registry.loaders
        before = [loader.even_batches for loader in loaders]
        if even_batches is not None:
            for loader in loaders:
                loader.even_batches = even_batches
        try:
            if self.processes.size == 1 or self.strategy.sharded:
                yield
            else:
                with Join(list(models)):
                    yield
        finally:
            for loader, even in zip(loaders, before, strict=True):
                loader.even_batches = even

    def end(self) -> None:
        """Wait for the other processes that end the training too."""
        run_on_all_or_main(self.processes, "end_training", self.processes.barrier, lambda: None)

    def reset(self) -> None:
        """Let go of all that was prepared."""
        self.registry.clear()
        self.gradients.optimizers.clear()
        self.gradients.forget()
        self.accumulation.reset()

    def _make_preparation(self, sharing: Sharing) -> Preparation:
        return Preparation(
            strategy=self.strategy,
            precision=self.precision,
            autocast=self.wishes.handler(AutocastKwargs),
            sharing=sharing,
            accumulation=self.accumulation,
            gradients=self.gradients,
            registry=self.registry,
            places=self.wishes.device_placement,
            step_scheduler_with_optimizer=self.wishes.step_scheduler_with_optimizer,
            compile_backend=self.wishes.compile_backend,
        )

    def _choose_strategy(self) -> Strategy:
        if self.processes.size == 1:
            return SingleDevice(device=self.device)
        settings = self.wishes.handler(DistributedDataParallelKwargs)
        return ConfiguredDDP(settings, self.device)


def _precision(name: str, scaler: GradScalerKwargs) -> Precision:
    if name != "fp16":
        return PRECISIONS[name]()
    return FP16(
        init_scale=scaler.init_scale,
        growth_factor=scaler.growth_factor,
        backoff_factor=scaler.backoff_factor,
        growth_interval=scaler.growth_interval,
    )
