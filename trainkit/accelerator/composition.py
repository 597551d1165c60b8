"""Puts the parts of an `Accelerator` together."""

import torch

from trainkit.accelerator.accelerator_config import AcceleratorConfig
from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.gradients import Gradients
from trainkit.accelerator.loader import Sharing
from trainkit.accelerator.preparer import ConfiguredDDP, Preparer, Registry
from trainkit.accelerator.settings import DistributedDataParallelKwargs, GradScalerKwargs
from trainkit.accelerator.state_contents import StateContents
from trainkit.accelerator.state_directory import StateDirectory
from trainkit.accelerator.state_saver import StateSaver
from trainkit.accelerator.tracking import Trackers
from trainkit.basics.launch_environment import MIXED_PRECISIONS
from trainkit.distributed import Processes
from trainkit.distributed.active_batches import ActiveLoaders
from trainkit.precision import FP16, Precision
from trainkit.strategies import SingleDevice
from trainkit.training.setup.arguments import make_precision

__all__ = ["OwnLoop"]


class OwnLoop:
    """The parts that an `Accelerator` passes its calls to.

    Args:
        active: Tells which samples of a batch are real.
    """

    def __init__(
        self,
        config: AcceleratorConfig,
        processes: Processes,
        device: torch.device,
        active: ActiveLoaders,
    ) -> None:
        self.config = config
        self.processes = processes
        self.registry = Registry()
        self.trackers = Trackers(config.log_with, config.project, processes)
        self.precision = _precision(config, device)
        if config.strategy is not None:
            self.strategy = config.strategy
        elif processes.size == 1:
            self.strategy = SingleDevice(device=device)
        else:
            self.strategy = ConfiguredDDP(config.handler(DistributedDataParallelKwargs), device)
        self.strategy.setup()
        self.accumulation = Accumulation(config.accumulation)
        self.gradients = Gradients(
            self.accumulation,
            self.precision,
            self.strategy,
            models=self.registry.models,
            scaled=config.handler(GradScalerKwargs).enabled,
        )
        sharing = Sharing(
            processes=processes,
            device=device if config.device_placement else torch.device("cpu"),
            configuration=config.data,
            rng_types=config.generators,
            active=active,
            accumulation=self.accumulation,
        )
        self.preparer = Preparer(
            config=config,
            strategy=self.strategy,
            precision=self.precision,
            sharing=sharing,
            accumulation=self.accumulation,
            gradients=self.gradients,
            registry=self.registry,
        )
        contents = StateContents(
            self.registry, self.strategy, self.gradients, self.accumulation, processes, device
        )
        self.states = StateSaver(contents, StateDirectory(config.project, processes))

    def reset(self) -> None:
        """Let go of all that was prepared."""
        self.registry.clear()
        self.gradients.optimizers.clear()
        self.gradients.forget()
        self.accumulation.reset()


def _precision(config: AcceleratorConfig, device: torch.device) -> Precision:
    precision = make_precision(MIXED_PRECISIONS[config.precision])
    if isinstance(precision, FP16):
        scaler: GradScalerKwargs = config.handler(GradScalerKwargs)
        precision = FP16(
            init_scale=scaler.init_scale,
            growth_factor=scaler.growth_factor,
            backoff_factor=scaler.backoff_factor,
            growth_interval=scaler.growth_interval,
        )
    precision.setup(device)
    return precision
