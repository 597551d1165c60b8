"""The arguments of `Accelerator`: checked, and completed from what the launcher says."""

import os
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from trainkit.accelerator.autocasting import InnerFP8
from trainkit.accelerator.parallel_loop import LoopModelParallel
from trainkit.accelerator.parallelism import ParallelismConfig
from trainkit.accelerator.plugins import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from trainkit.accelerator.profiling import ProfileKwargs
from trainkit.accelerator.settings import (
    AORecipeKwargs,
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
from trainkit.basics.parsing import boolean
from trainkit.basics.setting_readers import text, whole
from trainkit.distributed import Processes
from trainkit.distributed.rendezvous import INIT_METHOD
from trainkit.distributed.world import World
from trainkit.errors import ConfigError
from trainkit.precision import FP16, Precision
from trainkit.strategies import DDP, FSDP, ModelParallel, Strategy
from trainkit.training.setup.arguments import make_precision

HANDLERS = (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


class Handlers:
    """What `kwargs_handlers` has."""

    def __init__(self, given: Sequence[Any] | None) -> None:
        self._given = given or ()
        for handler in self._given:
            if not isinstance(handler, HANDLERS):
                kinds = ", ".join(kind.__name__ for kind in HANDLERS)
                raise ConfigError(
                    f"`kwargs_handlers` takes {kinds}, but has a `{type(handler).__name__}`. "
                    "Leave it out."
                )

    def of(self, kind: type[Any]) -> Any:
        """Return the settings of a kind; its defaults where there are none."""
        given = [one for one in self._given if isinstance(one, kind)]
        return given[0] if given else kind()


def chosen_precision(asked: Any) -> str:
    """Return "no", "fp16", "bf16" or "fp8"."""
    return _one_of("mixed_precision", asked or mixed_precision(), MIXED_PRECISIONS)


def precision_of(name: str, handlers: Handlers, device: torch.device) -> Precision:
    """Return the precision of a name, with the loss scale or the recipe that the user wants."""
    ao, scaler = handlers.of(AORecipeKwargs), handlers.of(GradScalerKwargs)
    if name != "fp8" and ao != AORecipeKwargs():
        raise ConfigError(
            f'`AORecipeKwargs` is for `mixed_precision="fp8"`, but that is {name!r}. Leave it out.'
        )
    if name == "fp8":
        precision: Precision = InnerFP8(ao.config or "tensorwise", convert=ao.module_filter_func)
    elif name == "fp16":
        precision = FP16(**{name: v for name, v in vars(scaler).items() if name != "enabled"})
    else:
        precision = make_precision(MIXED_PRECISIONS[name])
    precision.setup(device)
    return precision


def chosen_generators(rng_types: Sequence[Any] | None) -> tuple[str, ...]:
    """Return which generators a pass takes from process 0."""
    names, known = rng_types or ("generator",), ("generator", "torch", *generator_kinds())
    return tuple(_one_of("rng_types", name, known) for name in names)


def chosen_loading(
    given: DataLoaderConfiguration | None, split_batches: bool
) -> DataLoaderConfiguration:
    """Return how loaders are shared out."""
    chosen = given or DataLoaderConfiguration()
    if split_batches and not chosen.split_batches and World.from_env().size > 1:
        warnings.warn(
            "`Accelerator(split_batches=True)` has no effect, as in Accelerate since 1.0: the "
            "batch size of a loader is that of one process. To divide it by the number of "
            "processes pass `dataloader_config=DataLoaderConfiguration(split_batches=True)`; "
            "to keep it leave `split_batches` out.",
            stacklevel=4,
        )
    return chosen


def chosen_windows(
    steps: int, plugin: GradientAccumulationPlugin | None, usual: Any
) -> GradientAccumulationPlugin:
    """Return how gradients are accumulated; `usual` says it of a number where nobody else does."""
    if plugin is None:
        if steps == 1:
            usual = usual if isinstance(usual, int) else 1
            steps = read("GRADIENT_ACCUMULATION_STEPS", whole(1), usual)
        return GradientAccumulationPlugin(num_steps=steps)
    if steps != 1:
        raise ConfigError(
            "Pass `gradient_accumulation_steps` or `gradient_accumulation_plugin`, not both."
        )
    return plugin


def chosen_project(
    given: ProjectConfiguration | None, project_dir: str | Path | None
) -> ProjectConfiguration:
    """Return where the project writes."""
    project = given or ProjectConfiguration()
    if project_dir is not None and project.project_dir is None:
        project.set_directories(project_dir)
    return project


def compilation(backend: Any, plugin: TorchDynamoPlugin | None) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile`; None where nothing is compiled."""
    if plugin is not None and backend is not None:
        raise ConfigError("Pass `dynamo_backend` or `dynamo_plugin`, not both.")
    plugin = plugin or TorchDynamoPlugin(backend)
    return None if plugin.backend == "no" else plugin.to_kwargs()


def chosen_parallelism(given: Any) -> ParallelismConfig | None:
    """Return the sizes of groups that the user or `accelerate launch` says; None: nobody does."""
    if given is None and read("USE_PARALLELISM_CONFIG", boolean, False):
        return ParallelismConfig()
    if given is not None and not isinstance(given, ParallelismConfig):
        raise ConfigError(
            f"`parallelism_config` must be a `ParallelismConfig` of trainkit, but is a "
            f"`{type(given).__name__}`."
        )
    return given


def chosen_strategy(
    strategy: Any, fsdp_plugin: Any, hook: str, parallelism: ParallelismConfig | None = None
) -> Strategy | None:
    """Return the strategy that the user or the launcher asks for; None where nobody does."""
    given: Any = strategy or fsdp_plugin
    if isinstance(given, FullyShardedDataParallelPlugin):
        given = given.strategy()
    if given is not None and not isinstance(given, Strategy):
        raise ConfigError(
            f"`{'strategy' if strategy else 'fsdp_plugin'}` is a `{type(given).__name__}`, but "
            "must be a strategy, or a `FullyShardedDataParallelPlugin` of trainkit. For sharding "
            "pass `strategy=trainkit.strategies.FSDP(...)`."
        )
    if given is None and (said := sharding()) is not None:
        given = FSDP(**said)
    chosen: Strategy | None = given
    if chosen is not None and chosen.name == "deepspeed":
        raise ConfigError(
            "For DeepSpeed pass `Accelerator(deepspeed_plugin=DeepSpeedPlugin())` instead of a "
            "`strategy`."
        )
    if isinstance(chosen, ModelParallel):
        chosen = LoopModelParallel(device=chosen.agree_on(None))
    elif chosen is not None and type(chosen) is not DDP and _reduces_late(chosen):
        raise ConfigError(
            f"`{type(chosen).__name__}` averages gradients where a window ends, of which only a "
            "`Trainer` tells it. Use one, or a hook of `DistributedDataParallelKwargs`."
        )
    if parallelism is not None:
        chosen = parallelism.strategy(chosen)
    if chosen is not None and hook != "no":
        raise ConfigError(
            f"`comm_hook={str(hook)!r}` is for the DDP that `Accelerator` makes, but the "
            f"strategy is `{chosen.name}`. Leave one of the two out."
        )
    return chosen


def _reduces_late(strategy: Strategy) -> bool:
    return type(strategy).finish_reduction is not Strategy.finish_reduction


def chosen_device(device: Any, *, cpu: bool) -> Any:
    """Return the device of this process that the user or the launcher says; None: its own."""
    return "cpu" if cpu or uses_cpu() else device or read("TORCH_DEVICE", text, None)


def join(settings: InitProcessGroupKwargs, device: torch.device | str | None) -> None:
    """Join the other processes where the user says how."""
    method = settings.init_method
    if method is not None and World.from_env().size > 1:
        if torch.distributed.is_initialized() and os.environ.get(INIT_METHOD) != method:
            raise ConfigError(
                f"`InitProcessGroupKwargs(init_method={method!r})` has no effect: the process "
                "group exists already. Leave `init_method` out, or make the group only here."
            )
        os.environ[INIT_METHOD] = method
    if settings.timeout is not None:
        processes = Processes.start(device=None if device is None else torch.device(device))
        processes.set_timeout(as_timeout(settings.timeout, "InitProcessGroupKwargs.timeout"))


def _one_of(name: str, value: Any, known: Collection[str]) -> str:
    chosen = str(getattr(value, "value", value))  # perhaps a member of an enumeration of texts
    if chosen not in known:
        raise ConfigError(f"`{name}` must be one of {', '.join(known)}, but is {chosen!r}.")
    return chosen
