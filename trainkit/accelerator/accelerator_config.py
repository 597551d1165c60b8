"""What the user asks of an `Accelerator`, checked, and completed from the environment."""

import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from trainkit import strategies
from trainkit.accelerator.plugins import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from trainkit.accelerator.profiling import ProfileKwargs
from trainkit.accelerator.settings import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from trainkit.basics.config import as_timeout
from trainkit.basics.device import generator_kinds
from trainkit.basics.launch_environment import (
    MIXED_PRECISIONS,
    mixed_precision,
    read,
    sharding,
    uses_cpu,
)
from trainkit.basics.setting_readers import text, whole
from trainkit.distributed import Processes
from trainkit.distributed.rendezvous import INIT_METHOD
from trainkit.distributed.world import World
from trainkit.errors import ConfigError
from trainkit.strategies import Strategy

__all__ = ["AcceleratorConfig"]

HANDLERS = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


@dataclass(kw_only=True)
class AcceleratorConfig:
    """The settings of an `Accelerator`, under their names there.

    Raises:
        ConfigError: A setting cannot work.
    """

    device_placement: bool = True
    split_batches: bool = False
    mixed_precision: Any = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration | None = None
    fsdp_plugin: Any = None
    rng_types: Sequence[Any] | None = None
    log_with: Any = None
    project_dir: str | Path | None = None
    project_config: ProjectConfiguration | None = None
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: bool = True
    kwargs_handlers: Sequence[Any] | None = None
    dynamo_backend: Any = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    strategy: Strategy | None = None

    precision: str = field(init=False)
    autocast: AutocastKwargs = field(init=False)
    data: DataLoaderConfiguration = field(init=False)
    accumulation: GradientAccumulationPlugin = field(init=False)
    project: ProjectConfiguration = field(init=False)
    generators: tuple[str, ...] = field(init=False)
    compilation: dict[str, Any] | None = field(init=False)
    """Arguments of `torch.compile`."""

    def __post_init__(self) -> None:
        asked = self.mixed_precision or mixed_precision()
        self.precision = _one_of("mixed_precision", asked, MIXED_PRECISIONS)
        names, known = self.rng_types or ("generator",), ("generator", "torch", *generator_kinds())
        self.generators = tuple(_one_of("rng_types", name, known) for name in names)
        self.autocast = self.handler(AutocastKwargs)
        self.data = self._data()
        self.accumulation = self._accumulation()
        self.project = self.project_config or ProjectConfiguration()
        if self.project_dir is not None and self.project.project_dir is None:
            self.project.set_directories(self.project_dir)
        self.compilation = self._dynamo().arguments()
        self.cpu = self.cpu or uses_cpu()
        for handler in self.kwargs_handlers or ():
            if not isinstance(handler, HANDLERS):
                kinds = ", ".join(kind.__name__ for kind in HANDLERS)
                raise ConfigError(
                    f"`kwargs_handlers` takes {kinds}, but has a `{type(handler).__name__}`. "
                    "Leave it out."
                )
        self.strategy = self._strategy()

    def handler(self, kind: type[Any]) -> Any:
        """Return the settings of a kind; its defaults where there are none."""
        given = [one for one in self.kwargs_handlers or () if isinstance(one, kind)]
        return given[0] if given else kind()

    def start(self, device: torch.device | str | None) -> torch.device | str | None:
        """Join the other processes where the user says how; return the device."""
        device = "cpu" if self.cpu else device
        if self.strategy is not None:
            device = self.strategy.agree_on(device)
        settings: InitProcessGroupKwargs = self.handler(InitProcessGroupKwargs)
        if settings.init_method is not None and World.from_env().size > 1:
            _meet_at(settings.init_method)
        if settings.timeout is not None:
            wanted = None if device is None else torch.device(device)
            processes = Processes.start(device=wanted)
            processes.set_timeout(as_timeout(settings.timeout, "InitProcessGroupKwargs.timeout"))
        return device

    def _data(self) -> DataLoaderConfiguration:
        data = self.dataloader_config or DataLoaderConfiguration()
        if self.split_batches and not data.split_batches and World.from_env().size > 1:
            warnings.warn(
                "`Accelerator(split_batches=True)` has no effect, as in Accelerate since 1.0: the "
                "batch size of a loader is that of one process. To divide it by the number of "
                "processes pass `dataloader_config=DataLoaderConfiguration(split_batches=True)`; "
                "to keep it leave `split_batches` out.",
                stacklevel=6,
            )
        return data

    def _dynamo(self) -> TorchDynamoPlugin:
        if self.dynamo_plugin is None:
            backend = self.dynamo_backend or read("DYNAMO_BACKEND", text, "no")
            return TorchDynamoPlugin(backend=backend)
        if self.dynamo_backend is not None:
            raise ConfigError("Pass `dynamo_backend` or `dynamo_plugin`, not both.")
        return self.dynamo_plugin

    def _accumulation(self) -> GradientAccumulationPlugin:
        steps, plugin = self.gradient_accumulation_steps, self.gradient_accumulation_plugin
        if plugin is None:
            if steps == 1:
                steps = read("GRADIENT_ACCUMULATION_STEPS", whole(1), 1)
            return GradientAccumulationPlugin(num_steps=steps)
        if steps != 1:
            raise ConfigError(
                "Pass `gradient_accumulation_steps` or `gradient_accumulation_plugin`, not both."
            )
        return plugin

    def _strategy(self) -> Strategy | None:
        """Return the strategy that the user or the launcher asks for."""
        given: Any = self.strategy or self.fsdp_plugin
        if isinstance(given, FullyShardedDataParallelPlugin):
            given = given.strategy("cpu" if self.cpu else None)
        if given is not None and not isinstance(given, Strategy):
            raise ConfigError(
                f"`{'strategy' if self.strategy else 'fsdp_plugin'}` is a "
                f"`{type(given).__name__}`, but must be a strategy, or a "
                "`FullyShardedDataParallelPlugin` of trainkit. For sharding pass "
                "`strategy=trainkit.strategies.FSDP(...)`."
            )
        asked = None if given is not None else sharding()
        if asked is not None:
            given = strategies.FSDP(device="cpu" if self.cpu else None, **asked)
        chosen: Strategy | None = given
        hook = self.handler(DistributedDataParallelKwargs).comm_hook
        if chosen is not None and hook != "no":
            raise ConfigError(
                f"`comm_hook={str(hook)!r}` is for the DDP that `Accelerator` makes, but the "
                f"strategy is `{chosen.name}`. Leave one of the two out."
            )
        return chosen


def _one_of(name: str, value: Any, known: Collection[str]) -> str:
    chosen = str(getattr(value, "value", value))  # perhaps a member of an enumeration of texts
    if chosen not in known:
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}, but is {chosen!r}.")
    return chosen


def _meet_at(method: str) -> None:
    """Let the process group be made by an `init_method`."""
    if torch.distributed.is_initialized() and os.environ.get(INIT_METHOD) != method:
        raise ConfigError(
            f"`InitProcessGroupKwargs(init_method={method!r})` has no effect: the process "
            "group exists already. Leave `init_method` out, or make the group only here."
        )
    os.environ[INIT_METHOD] = method
