"""Accelerator: the face for people who keep their own loop."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from typing_extensions import override

from trainkit.accelerator import arguments
from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.attributes import Attributes
from trainkit.accelerator.autocasting import autocast, unwrap
from trainkit.accelerator.deepspeed_plugin import chosen_plugin
from trainkit.accelerator.gradients import Gradients
from trainkit.accelerator.loader import SharedLoader, Sharing, SkippedLoader, skip_first_batches
from trainkit.accelerator.optimizer import PreparedOptimizer
from trainkit.accelerator.parallel_loop import LoopModelParallel
from trainkit.accelerator.preparer import ConfiguredDDP, Preparer, Registry
from trainkit.accelerator.profiling import ProfileKwargs, profiled
from trainkit.accelerator.scheduler import PreparedScheduler
from trainkit.accelerator.settings import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from trainkit.accelerator.state import UNDER_WAY, AcceleratorState
from trainkit.accelerator.state_contents import StateContents
from trainkit.accelerator.state_directory import StateDirectory
from trainkit.accelerator.state_saver import StateSaver, warn_of_options
from trainkit.accelerator.tracking import Trackers
from trainkit.accelerator.zero_loop import LoopDeepSpeed
from trainkit.basics.config import checked
from trainkit.distributed import check_called_by_all, run_on_all_or_main
from trainkit.errors import DataError
from trainkit.strategies import DDP, FSDP, SingleDevice

if TYPE_CHECKING:
    from torch.profiler import profile
    from torch.utils.hooks import RemovableHandle


class Accelerator(Attributes):
    """What a training loop of your own needs, with the names of Hugging Face Accelerate.

    A script written for Accelerate runs after its import is changed; what differs on purpose
    stands in docs/migrating-from-accelerate.md. Every process calls the same methods in the same
    order.

    Args:
        device_placement: Whether models and batches move to the device.
        split_batches: Without effect, as in Accelerate 1.15, and with a warning: it is said by
            `DataLoaderConfiguration(split_batches=True)`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None: what the launcher says.
        gradient_accumulation_steps: Micro-batches of one process for each update.
        cpu: Use the CPU also where there is a GPU.
        dataloader_config: How loaders are shared out.
        fsdp_plugin: A `FullyShardedDataParallelPlugin`, or the same as `strategy`.
        rng_types: Generators that a pass takes from process 0: "generator", "torch", or
            the type of a device such as "cuda".
        log_with: "tensorboard", "jsonl", "csv", "wandb", "mlflow", "trackio", "all" (those that
            write files), a `GeneralTracker`, or a list of these.
        project_dir: Folder of checkpoints and logs.
        project_config: The same, with `automatic_checkpoint_naming` and `total_limit`.
        gradient_accumulation_plugin: Instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: Whether prepared schedulers follow the optimizers.
        kwargs_handlers: `GradScalerKwargs`, `DistributedDataParallelKwargs` and the like.
        dynamo_backend: Run models through `torch.compile` with this backend.
        dynamo_plugin: The same, with its other arguments.
        deepspeed_plugin: A `DeepSpeedPlugin`: one model and one optimizer, shared out by ZeRO.
        megatron_lm_plugin: None; see `strategy`.
        parallelism_config: A `ParallelismConfig`: over how many processes a model is sharded.
        strategy: A strategy of `trainkit.strategies`, such as `FSDP()`; by default what the
            launcher says, else the single device, or DDP on several processes.
        device: The device of this process; its own accelerator by default, else the CPU.

    Raises:
        ConfigError: A setting cannot work.
    """

    @checked
    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | Enum | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        *,
        fsdp_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: str | Enum | None = None,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        megatron_lm_plugin: None = None,
        parallelism_config: Any = None,
        strategy: Any = None,
        device: torch.device | str | None = None,
    ) -> None:
        handlers = arguments.Handlers(kwargs_handlers)
        torch_device = arguments.chosen_device(device, cpu=cpu)
        zero = chosen_plugin(deepspeed_plugin, strategy, fsdp_plugin)
        precision_name = arguments.chosen_precision(mixed_precision)
        if zero is not None and mixed_precision is None and precision_name == "no":
            precision_name = zero.precision() or precision_name
        generators = arguments.chosen_generators(rng_types)
        loading = arguments.chosen_loading(dataloader_config, split_batches)
        windows = arguments.chosen_windows(
            gradient_accumulation_steps, gradient_accumulation_plugin, zero and zero.steps
        )
        self._project = arguments.chosen_project(project_config, project_dir)
        compiled = arguments.compilation(dynamo_backend, dynamo_plugin)
        groups = arguments.chosen_parallelism(parallelism_config)
        self._ddp = ddp = handlers.of(DistributedDataParallelKwargs)
        if zero is not None:
            zero.take(precision_name, windows.num_steps)
        chosen = (
            arguments.chosen_strategy(strategy, fsdp_plugin, ddp.comm_hook, groups)
            if zero is None
            else LoopDeepSpeed(zero)
        )
        if chosen is not None:
            torch_device = chosen.agree_on(torch_device)
        shared = 1
        if type(chosen) is DDP:  # which a `Trainer` tells where windows end
            unused, cap = chosen.find_unused_parameters, chosen.bucket_cap_mb
            shared = chosen.context_parallel
            self._ddp = ddp = replace(
                ddp, find_unused_parameters=unused, bucket_cap_mb=cap or ddp.bucket_cap_mb
            )
            chosen = None
        self.init_handler = handlers.of(InitProcessGroupKwargs)
        arguments.join(self.init_handler, torch_device)
        super().__init__(device=torch_device)
        processes = self.processes
        self.loaders = UNDER_WAY
        self.profile_handler = handlers.of(ProfileKwargs)
        self._trackers = Trackers(log_with, self._project, processes)
        self.scaler_handler = scaler = handlers.of(GradScalerKwargs)
        precision = arguments.precision_of(precision_name, handlers, self.device)
        if chosen is None and processes.size == shared == 1:
            chosen = SingleDevice(device=self.device)
        elif chosen is None:
            chosen = ConfiguredDDP(ddp, self.device)
            chosen.context_parallel = shared
        chosen.setup()
        self.data_processes = chosen.data_processes
        self._strategy = chosen
        self._registry = registry = Registry()
        self._accumulation = Accumulation(windows, self.loaders)
        self._gradients = Gradients(
            self._accumulation, precision, chosen, models=registry.models, scaled=scaler.enabled
        )
        sharing = Sharing(
            processes=self.data_processes,
            device=self.device,
            configuration=loading,
            rng_types=generators,
            active=self.loaders,
            accumulation=self._accumulation,
        )
        self._preparer = Preparer(
            autocast=handlers.of(AutocastKwargs),
            compilation=compiled,
            device_placement=device_placement,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            strategy=chosen,
            precision=precision,
            sharing=sharing,
            accumulation=self._accumulation,
            gradients=self._gradients,
            registry=registry,
        )
        contents = StateContents(
            registry, chosen, self._gradients, self._accumulation, processes, self.device
        )
        self._states = StateSaver(contents, StateDirectory(self._project, processes))
        self._has_trigger = False
        self.state = AcceleratorState.of(
            self,
            self._accumulation,
            mixed_precision=precision_name,
            fsdp_plugin=fsdp_plugin,
            parallelism=groups,
            deepspeed_plugin=zero,
            sharded=isinstance(chosen, FSDP),
        )
        """The place of this process; `logger.info(accelerator.state)` writes it as text."""

    @override
    def __reduce__(self) -> Any:
        """Let workers of `datasets` and the like have the state, without what was prepared."""
        return self.state.__reduce__()

    def __deepcopy__(self, memo: Any) -> Self:
        """Return this object: what refers to it belongs to this process."""
        return self

    # What the loop is like; most of it stands in `Attributes`.

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a full window on one process."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.resize(value)
        self._preparer.check_windows()
        if self.deepspeed_plugin is not None:
            self.deepspeed_config["gradient_accumulation_steps"] = value

    @property
    def native_amp(self) -> bool:
        """Whether models that are prepared from now on run under autocast; may be set to False."""
        return self.mixed_precision != "no" and self._preparer.autocast.enabled

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        self._preparer.autocast = replace(self._preparer.autocast, enabled=value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest step of a prepared optimizer was left out because of an overflow."""
        return any(optimizer.step_was_skipped for optimizer in self._registry.optimizers)

    # Models, optimizers, schedulers and loaders.

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Return models, optimizers, schedulers and loaders as a loop uses them, in their order.

        Args:
            *args: Any of these, in any order; None and iterators stay as they are.
            device_placement: For each of them whether it moves to the device.

        Raises:
            ConfigError: An object is of another kind.
        """
        prepared = self._preparer.prepare(args, device_placement)
        self.data_processes = self._preparer.sharing.processes
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return a model as the loop calls it; not wrapped where it is only evaluated."""
        if not evaluation_mode:
            self._preparer.check_alike([model])
            self._preparer.adopt([model])
            self.data_processes = self._preparer.sharing.processes
        return self._preparer.model(model, device_placement, evaluation_mode=evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Return an optimizer that follows the windows."""
        self._preparer.check_alike([optimizer])
        return self._preparer.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Return a scheduler that follows the prepared optimizers."""
        self._preparer.check_alike([scheduler])
        return self._preparer.scheduler(scheduler)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None
    ) -> SharedLoader:
        """Return a loader whose batches are shared out over the processes."""
        self._preparer.check_alike([data_loader])
        return self._preparer.loader(data_loader, device_placement)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> SkippedLoader:
        """Return a loader without its first batches, to go on in the middle of an epoch."""
        return skip_first_batches(dataloader, num_batches)

    # One step.

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Run one micro-batch inside; models reduce gradients only where a window ends."""
        reduces = self._accumulation.advance() or self._accumulation.plugin.sync_each_batch
        with ExitStack() as stack:
            for model in models:
                if not reduces:
                    stack.enter_context(self._strategy.no_sync(model))
            yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward accumulates without reducing over processes."""
        return self._strategy.no_sync(model)

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Let a backward inside reduce, also of forwards under `no_sync`."""
        self._strategy.begin_reduction(model)
        yield
        self._strategy.finish_reduction(model, self._preparer.precision)

    def profile(self, profile_handler: Any = None) -> AbstractContextManager["profile"]:
        """Return a context whose code is recorded; see `ProfileKwargs`."""
        return profiled(profile_handler or self.profile_handler, self.processes)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[object]:
        """Return a context in which code outside of a model runs in the mixed precision."""
        dtype = self._preparer.precision.dtype
        if dtype is None:
            return nullcontext()
        return autocast(self.device.type, dtype, autocast_handler or self._preparer.autocast)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss`, divided by the micro-batches of the window.

        Args:
            loss: A scalar.
            **kwargs: Of `Tensor.backward`.
        """
        self._gradients.backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring the gradients of one prepared optimizer, or a list, or all to their true scale."""
        wanted = self._registry.optimizers if optimizer is None else optimizer
        for one in wanted if isinstance(wanted, list | tuple) else [wanted]:
            self._gradients.unscale_once(getattr(one, "optimizer", one))

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the norm of the gradients, unscaled, over all processes; return what it was."""
        return self._gradients.clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip every element of the unscaled gradients to [-clip_value, clip_value]."""
        self._gradients.clip_value(parameters, clip_value)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Let processes with fewer batches wait for the others inside.

        Args:
            joinables: Prepared models.
            even_batches: Overrides `even_batches` of all prepared loaders inside.
        """
        loaders = self._registry.loaders
        before = [loader.even_batches for loader in loaders]
        if even_batches is not None:
            if not all(loader.fills_up for loader in loaders):
                warnings.warn(
                    "`even_batches` is only supported for map-style datasets; loaders of others "
                    "are left as they are.",
                    stacklevel=3,
                )
            for loader in loaders:
                loader.even_batches = even_batches
        zero = self.deepspeed_plugin is not None
        alone = self.num_processes == 1 or self._strategy.sharded or zero
        try:
            with nullcontext() if alone else Join(list(joinables)):
                yield
        finally:
            for loader, even in zip(loaders, before, strict=True):
                loader.even_batches = even

    @override
    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        strict: bool = False,
        **options: Any,
    ) -> Any:
        if self._accumulation.is_unpaired:
            raise DataError(
                "Not every process has a batch in this global batch, so not every process gathers. "
                "Leave `even_batches=False` out: what fills batches up is never gathered."
            )
        return super().gather_for_metrics(input_data, use_gather_object, strict=strict, **options)

    def set_trigger(self) -> None:
        """Ask, on this process, that `check_trigger` tells all."""
        self._has_trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process has called `set_trigger`, and begin anew; all call it."""
        flag = torch.tensor([float(self._has_trigger)])
        self._has_trigger = False
        return self.processes.all_reduce(flag, "max").item() != 0

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of all that was prepared; returns None for each object, to be assigned to it."""
        from trainkit.basics.memory import release_memory

        self.loaders.forget_loaders(self._registry.loaders)
        self._registry.clear()
        self._gradients.optimizers.clear()
        self._gradients.forget()
        self._accumulation.reset()
        if isinstance(self._strategy, LoopDeepSpeed | LoopModelParallel):
            self._strategy.release()
        return release_memory(*objects)

    clear = free_memory

    # What a loop writes: states, models and values.

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's module.

        Args:
            model: Prepared or not.
            keep_fp32_wrapper: Whether its forward still runs under autocast.
            keep_torch_compile: Whether a model that `torch.compile` returned stays compiled.
        """
        return unwrap(
            model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load more objects with every state: those with a state dict."""
        self._states.register(objects)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        check_replicas: bool = True,
        **options: Any,
    ) -> str:
        """Save models, optimizers, schedulers, scale, loaders, random states and objects.

        For an exact resume every process must call it. Process 0 alone may: it waits until the
        others have begun a later collective, and the state lacks their random streams. Sharded
        models need every process. What stands in the folder before is replaced when the new state
        is complete.

        Args:
            output_dir: The folder; not needed with `automatic_checkpoint_naming`.
            safe_serialization: False writes the same, and warns: states hold no pickle.
            check_replicas: Save nothing where processes that call it do not hold the same
                parameters and optimizer states to the bit. False: those of process 0 are saved.
            **options: For DeepSpeed, in Accelerate; without effect, and with a warning.

        Raises:
            ConfigError: There is no folder; or process 0 is alone, inside a window.
            CheckpointError: It failed on some process; an earlier state is untouched.
            DistributedError: Processes that must call it do not, or they do not hold the same.
        """
        if not safe_serialization:
            warnings.warn(
                "`save_state(safe_serialization=False)` writes safetensors all the same, as states "
                "hold no pickle. For a model as torch writes it call `save_model` in this way.",
                stacklevel=2,
            )
        if options:
            warn_of_options("save_state", options)
        return str(self._states.save(output_dir, check_replicas))

    def load_state(
        self,
        input_dir: str | Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        **options: Any,
    ) -> None:
        """Load what `save_state` saved, into what is prepared. Every process must call it.

        Args:
            input_dir: The folder; with `automatic_checkpoint_naming` by default the newest that
                verifies.
            load_kwargs: Of `torch.load`, in Accelerate; a state holds no pickle, so without effect.
            strict: False: entries that a model lacks are left out, and those that the state lacks
                keep their values; which they are is printed.
            **options: For DeepSpeed, in Accelerate; without effect, and with a warning.

        Raises:
            CheckpointError: There is none, or it is broken, or does not fit.
        """
        options.pop("map_location", None)  # tensors go to where those of the models are
        if options:
            warn_of_options("load_state", options)
        self._states.load(input_dir, self.print, strict)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> "RemovableHandle":
        """Call `hook(models, weights, output_dir)` before each save, wherever it is called."""
        return self._states.before_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> "RemovableHandle":
        """Call `hook(models, input_dir)` before each load, on every process."""
        return self._states.before_load(hook)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object on the main process: as torch does, or tensors as safetensors."""
        from trainkit.export.pickled import save

        if self.is_main_process:
            save(obj, f, safe_serialization=safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model so that `from_pretrained` can read it; see `trainkit.export.save_model`."""
        from trainkit.export import save_model

        save_model(
            self.unwrap_model(model, keep_torch_compile=False),
            save_directory,
            max_shard_size=max_shard_size,
            safe_serialization=safe_serialization,
            processes=self.processes,
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state of a model; of a sharded one every process must ask for it."""
        from trainkit.checkpoint.resharding.sharding_spec import is_sharded
        from trainkit.export.state import whole

        module = self.unwrap_model(model, keep_torch_compile=False) if unwrap else model
        state = module.state_dict(keep_vars=True)
        if any(map(is_sharded, state.values())):
            check_called_by_all(self.processes, "get_state_dict")
        return {name: whole(v) if isinstance(v, Tensor) else v for name, v in state.items()}

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the trackers of `log_with`.

        Args:
            project_name: Name of the run.
            config: Settings of the run, to be noted.
            init_kwargs: Arguments of trackers by their names.
        """
        self._trackers.start(project_name, config, init_kwargs or {})

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Give values to every tracker of this process."""
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker, or its library's own run; one that does nothing on other processes."""
        return self._trackers.find(name, unwrap=unwrap)

    def end_training(self) -> None:
        """End all trackers, and wait for the other processes that call it too."""
        self._trackers.finish()
        self._states.release()
        wait = self.processes.barrier
        run_on_all_or_main(self.processes, "end_training", wait, lambda: None)
