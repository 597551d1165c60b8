"""What `prepare` makes of models, optimizers, schedulers and loaders."""

import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.autocasting import run_in_autocast
from trainkit.accelerator.communication import register
from trainkit.accelerator.gradients import Gradients
from trainkit.accelerator.loader import SharedLoader, Sharing, SkippedLoader
from trainkit.accelerator.optimizer import PreparedOptimizer
from trainkit.accelerator.parallel_loop import LoopModelParallel
from trainkit.accelerator.scheduler import PreparedScheduler
from trainkit.accelerator.settings import AutocastKwargs, DistributedDataParallelKwargs
from trainkit.accelerator.zero_loop import LoopDeepSpeed, schedules
from trainkit.basics import rng
from trainkit.basics.device import move_module
from trainkit.basics.torch_internals import sharded_groups, was_called
from trainkit.data import training_loader
from trainkit.data.batch_sources import Presharded
from trainkit.errors import ConfigError
from trainkit.export.state import READ, unwrapped
from trainkit.precision import FP32, Precision
from trainkit.precision.fp8 import restore
from trainkit.strategies import DDP, Strategy
from trainkit.strategies.ddp import Reducing
from trainkit.training.setup.arguments import check_compile, check_initialised
from trainkit.training.setup.consistency import check_alike, describe_model, describe_samples
from trainkit.training.setup.settings import optimizer_settings, program, settings
from trainkit.types import class_name

_MARK = "_is_accelerate_prepared"  # by which libraries know what Accelerate has prepared
PREPARED = (SharedLoader, SkippedLoader, PreparedOptimizer, PreparedScheduler)


@dataclass(slots=True)
class Registry:
    """What was prepared or registered, in the order in which it was."""

    models: list[nn.Module] = field(default_factory=list)
    """As wrapped by the strategy."""
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[PreparedScheduler] = field(default_factory=list)
    loaders: list[SharedLoader] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    """What the user registered for checkpointing."""

    def clear(self) -> None:
        """Let go of everything, and stop the loaders' workers."""
        for loader in self.loaders:
            loader.close()
        for things in (self.models, self.optimizers, self.schedulers, self.loaders, self.objects):
            things.clear()


class ConfiguredDDP(DDP):
    """DDP with the settings of the user."""

    def __init__(self, settings: DistributedDataParallelKwargs, device: torch.device) -> None:
        super().__init__(device=device)
        self.settings = settings
        """May be changed until a model is wrapped."""

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        given = self.settings
        # A static graph finds them itself.
        self.find_unused_parameters = given.find_unused_parameters and not given.static_graph
        self.bucket_cap_mb = given.bucket_cap_mb
        wrapped = super().wrap(model, precision, seed)
        if isinstance(wrapped, Reducing):
            wrapped.require_backward_grad_sync = True  # a loop calls `backward` as it likes
            wrapped.broadcast_buffers = given.broadcast_buffers  # from now on: all begin alike
            wrapped.register_forward_pre_hook(self._follow_thaw)
            if given.comm_hook != "no":
                register(wrapped, given.comm_hook, given.comm_wrapper, given.comm_state_option)
        return wrapped

    def _follow_thaw(self, model: nn.Module, _: Any) -> None:
        assert isinstance(model, Reducing)
        if model.has_thawed:  # what froze may thaw again before its turn, as in adversarial loops
            self._check_frozen(dict(model.module.named_parameters()))
            model.renew()

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        return model.no_sync() if isinstance(model, Reducing) else super().no_sync(model)

    @override
    def _options(self) -> dict[str, Any]:
        return super()._options() | {"static_graph": self.settings.static_graph}


@dataclass(kw_only=True)
class Preparer:
    """Prepares objects of a loop of the user's own, and notes them.

    Args:
        autocast: How models run that are prepared from now on.
        compilation: Arguments of `torch.compile`; None: models are not compiled.
    """

    autocast: AutocastKwargs
    compilation: dict[str, Any] | None
    device_placement: bool
    step_scheduler_with_optimizer: bool
    strategy: Strategy
    precision: Precision
    sharing: Sharing
    accumulation: Accumulation
    gradients: Gradients
    registry: Registry

    def prepare(
        self, objects: Sequence[Any], device_placement: Sequence[bool | None] | None
    ) -> list[Any]:
        """Return the prepared objects in the order of `objects`.

        Models come first and schedulers last, whatever the order: an optimizer must see the
        parameters that its model has in the end, a scheduler its optimizer.

        Raises:
            ConfigError: Processes that are to train together have others, such as data sets of
                other lengths; on all processes.
        """
        moves = device_placement or [None] * len(objects)
        if len(moves) != len(objects):
            raise ConfigError(
                f"`device_placement` must say it for each of the {len(objects)} objects, but has "
                f"{len(moves)} entries."
            )
        for index, thing in enumerate(objects):
            if self.sharing.processes.size > 1:
                _look_for_data(thing, index)
        self.check_alike(objects)
        self.adopt(objects)
        if isinstance(self.strategy, LoopDeepSpeed):
            split = self.sharing.configuration.split_batches
            steps = self.accumulation.num_steps
            objects = self.strategy.settle(objects, steps=steps, split=split)
        results = list(objects)
        kinds: tuple[tuple[Any, Callable[[Any, bool | None], Any]], ...] = (
            (nn.Module, self.model),
            (Optimizer, self.optimizer),
            ((DataLoader, Presharded), self.loader),
            (schedules(), self.scheduler),
        )
        for kind, make in kinds:
            for index, (thing, moved) in enumerate(zip(objects, moves, strict=True)):
                if isinstance(thing, kind) and not self._is_prepared(thing):
                    results[index] = prepared = make(thing, moved)
                    setattr(prepared, _MARK, True)
        return results

    def adopt(self, objects: Sequence[Any]) -> None:
        """Share samples out over those that have some of their own, as a model that comes tells."""
        models = [thing for thing in objects if isinstance(thing, nn.Module)]
        if isinstance(self.strategy, LoopModelParallel) and models and not self.registry.models:
            if self.registry.loaders:
                raise ConfigError(
                    "A model that comes parallel says who sees which samples. Prepare it before "
                    "the loaders, or in one call with them."
                )
            self.sharing.processes = self.strategy.adopt(models[0])

    def check_alike(self, objects: Sequence[Any]) -> None:
        """Raise, on all processes, where loaders, or what trains a model held together, differ."""
        if any(map(self._trains_together, objects)):
            check_alike(self.sharing.processes, self._facts_of(objects))
        elif any(map(_is_raw_loader, objects)):
            check_alike(self.sharing.processes, self._loaders_of(objects))

    def _trains_together(self, obj: Any) -> bool:
        """Return whether something is, or trains, a model that the processes hold together."""
        if isinstance(obj, nn.Module):
            return self._joins(obj)
        groups = getattr(getattr(obj, "optimizer", obj), "param_groups", [])
        own = {id(p) for group in groups for p in group["params"]}
        models = [model for model in self.registry.models if self._joins(model)]
        known = {id(p) for model in models for p in model.parameters()}
        return bool(own) and bool(models) and (self.strategy.sharded or bool(own & known))

    def _facts_of(self, objects: Sequence[Any]) -> Iterator[tuple[str, str]]:
        """Yield, in words, what every process must have alike."""
        yield from program()
        yield "what `prepare` was given", repr([class_name(thing) for thing in objects])
        yield from settings("strategy", self.strategy, whole=False)
        yield from settings("precision", self.precision, whole=False)
        yield from settings("autocast", self.autocast, whole=False)
        yield from settings("compilation", self.compilation, whole=False)
        yield from settings("gradient_accumulation", self.accumulation.plugin)
        yield from settings("dataloader_config", self.sharing.configuration)
        yield from self._loaders_of(objects)
        for index, thing in enumerate(objects):
            argument = f"prepare(...)[{index}]"
            if isinstance(thing, nn.Module) and not self._is_prepared(thing):
                yield from describe_model(f"`{argument}`", thing)
            if isinstance(thing, Optimizer):
                # A group made of a `set` has another order on each process, and nothing follows it.
                yield from optimizer_settings(argument, thing, ordered=False)
            if isinstance(thing, LRScheduler):
                yield from settings(argument, thing)

    def _loaders_of(self, objects: Sequence[Any]) -> Iterator[tuple[str, str]]:
        for index, thing in enumerate(objects):
            data = thing.dataset if _is_raw_loader(thing) else None
            if isinstance(data, Sized) and not isinstance(data, IterableDataset):
                words = [f"{len(data)} samples, batch size {thing.batch_size}"]
                if not self.sharing.configuration.dispatch_batches:  # else process 0 reads for all
                    words += describe_samples(thing)
                yield f"the loader at position {index} of `prepare`", ", ".join(words)

    def model(
        self, model: nn.Module, moved: bool | None = None, *, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return a model as the loop calls it.

        Args:
            moved: Whether it moves to the device; None: as the settings say, here and below.
        """
        for known in self.registry.models:
            if model is unwrapped(known):
                return known
        check_initialised(model)
        if self.strategy.context is not None and hasattr(model, "config"):  # else the loop cuts
            self.strategy.context.attach(model)
        stays = self._stays(model, evaluation_mode)
        restore(() if self.precision.name == "fp8" else model.modules())  # an earlier one's
        self.precision.convert(model)
        dtype = self.precision.dtype
        if dtype is not None and not isinstance(self.precision, FP32):
            run_in_autocast(model, self.sharing.device.type, dtype, self.autocast)
        if self.compilation is not None:
            if not evaluation_mode:
                self.check_windows()
            model.compile(**self.compilation)
        if self._moves(moved) and not stays:
            move_module(model, self.sharing.device)
        wrapped = model
        joins = self.strategy.sharded or (self._joins(model) and not evaluation_mode)
        if joins and not stays:
            wrapped = self.strategy.wrap(model, self.precision)
            for module in wrapped.modules() if self.strategy.sharded else ():
                vars(module)["zero_grad"] = partial(_zero_grad, module, [wrapped])
        if not evaluation_mode:
            self.registry.models.append(wrapped)
        return wrapped

    def _stays(self, model: nn.Module, evaluation_mode: bool) -> bool:
        """Return whether a device map has put parts of a model elsewhere, where they stay."""
        devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
        quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))
        apart = {"disk"} if self.sharing.device.type == "cpu" else {"cpu", "disk"}
        offloaded = any(hasattr(p, READ) for p in model.parameters())
        stays = offloaded or any(len(getattr(m, "hf_device_map", ())) > 1 for m in model.modules())
        alone = self.sharing.processes.size == 1
        if not evaluation_mode and ((quantized and devices & apart) or (stays and not alone)):
            raise ConfigError(
                f"`device_map` has put the model on {sorted(devices)}: on several processes, or in "
                "4 or 8 bits with CPU or disk offload, it cannot be trained. Load all of it on the "
                "device, or pass `evaluation_mode=True` to `prepare_model`."
            )
        return stays

    def check_windows(self) -> None:
        """Raise where models are compiled in a way that would overwrite gradients of a window."""
        many = self.accumulation.num_steps > 1
        check_compile(self.compilation or False, self.sharing.device, accumulates=many)

    def _joins(self, model: nn.Module) -> bool:
        """Return whether the processes hold a model together."""
        return self.strategy.sharded or any(p.requires_grad for p in model.parameters())

    def optimizer(self, optimizer: Optimizer, moved: bool | None = None) -> PreparedOptimizer:
        """Return an optimizer that follows the windows, on the models' present parameters."""
        if any(hasattr(p, READ) for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "The optimizer has parameters that a device map keeps on CPU or disk, for "
                "inference: they get no gradients. Load the model without `device_map`."
            )
        for model in self.registry.models:
            self.strategy.rebind_optimizer(optimizer, self.strategy.unwrap(model))
        if isinstance(self.strategy, LoopDeepSpeed):
            self.strategy.check_bound()
        elif self.strategy.sharded:
            vars(optimizer)["zero_grad"] = partial(_zero_grad, optimizer, self.registry.models)
        for group in optimizer.param_groups if self._moves(moved) else ():
            counts = group.get("fused") or group.get("capturable")  # on the device, as torch wants
            for parameter in group["params"]:
                for name, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and (value.ndim or counts):
                        optimizer.state[parameter][name] = value.to(parameter.device)
        self.precision.bind(optimizer)
        ddp = [m for m in self.registry.models if isinstance(m, DistributedDataParallel)]
        look = partial(_look_at_gradients, optimizer, ddp) if ddp else None
        prepared = PreparedOptimizer(optimizer, self.accumulation, self.gradients, look)
        self.gradients.optimizers.append(optimizer)
        self.registry.optimizers.append(prepared)
        return prepared

    def loader(self, loader: Any, moved: bool | None = None) -> SharedLoader:
        """Return a loader whose batches are shared out over the processes."""
        rules = replace(self.sharing.configuration)  # what is set later is for later loaders
        sharing = replace(self.sharing, configuration=rules, moves=self._moves(moved))
        self.registry.loaders.append(prepared := shared_out(loader, sharing))
        return prepared

    def scheduler(self, scheduler: Any, moved: bool | None = None) -> PreparedScheduler:
        """Return a scheduler that follows its optimizer, or all of them."""
        own = getattr(scheduler, "optimizer", None)
        followed = [one for one in self.registry.optimizers if own in (one, one.optimizer)]
        split = self.sharing.configuration.split_batches
        strategy = self.strategy
        once = split or (isinstance(strategy, LoopDeepSpeed) and strategy.by_update(scheduler))
        prepared = PreparedScheduler(
            scheduler,
            followed or self.registry.optimizers,
            self.accumulation,
            steps=1 if once else self.sharing.processes.size,
            step_with_optimizer=self.step_scheduler_with_optimizer,
        )
        self.registry.schedulers.append(prepared)
        return prepared

    def _is_prepared(self, obj: Any) -> bool:
        return isinstance(obj, PREPARED) or any(obj is m for m in self.registry.models)

    def _moves(self, asked: bool | None) -> bool:
        return self.device_placement if asked is None else asked


def _is_raw_loader(obj: Any) -> bool:
    return isinstance(obj, DataLoader) and not isinstance(obj, PREPARED)


def _zero_grad(obj: Any, models: Sequence[nn.Module], set_to_none: bool = True) -> None:
    """Clear the gradients of a module or optimizer, also those that wait to be reduced."""
    type(obj).zero_grad(obj, set_to_none)
    groups = getattr(obj, "param_groups", None)
    held = {*(obj.parameters() if groups is None else (p for g in groups for p in g["params"]))}
    for _, parts in chain.from_iterable(map(sharded_groups, models)):
        for p, part in parts.items():  # `p` may be gathered now
            if not held.isdisjoint((p, part.sharded_param)) and hasattr(part, "unsharded_param"):
                part.unsharded_param.grad = None
                if "unsharded_accumulated_grad" in vars(part):  # in torch 2.15 it is the same
                    part.unsharded_accumulated_grad = None


def _look_for_data(obj: Any, index: int) -> None:
    """Warn if something is handed back that looks like data, which every process would read."""
    known = isinstance(obj, (nn.Module, Optimizer, DataLoader, Presharded, *PREPARED))
    if not known and any(hasattr(obj, name) for name in ("__iter__", "__getitem__")):
        warnings.warn(
            f"Argument {index} of `prepare` is a `{type(obj).__name__}`, which stays as it is: "
            "every process takes all that it yields. Prepare the `DataLoader` that it reads, or "
            "the parts of it one by one.",
            stacklevel=4,
        )


def _look_at_gradients(optimizer: Optimizer, models: Sequence[DistributedDataParallel]) -> None:
    """Warn if an optimizer is to use gradients of a model that was never called: none averaged."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        used = (p for p in model.parameters() if p.grad is not None)
        if not was_called(model) and any(id(p) in held for p in used):
            warnings.warn(
                f"The first step of `{type(optimizer).__name__}` uses gradients of a "
                f"`{type(model.module).__name__}` that were not averaged over the processes: what "
                "`prepare` returned for it was never called, and each process trains its own. Call "
                "that, also inside of wrappers, instead of the model that `prepare` was given.",
                stacklevel=3,
            )


def shared_out(loader: Any, sharing: Sharing) -> SharedLoader:
    """Return a loader whose batches are shared out over the processes of `sharing`."""
    seed = int(sharing.processes.broadcast_object(torch.initial_seed()))
    if sharing.configuration.dispatch_batches and sharing.processes.size > 1:
        from trainkit.accelerator.dispatched import DispatchedShare, for_process_0

        if isinstance(loader, Presharded):
            raise ConfigError(
                "The loader is `presharded`: each process reads its own share, and with "
                "`dispatch_batches=True` process 0 would read for all. Use one of the two."
            )
        reader = _share(loader, for_process_0(sharing), seed)
        prepared: SharedLoader = DispatchedShare(reader, sharing)
    else:
        prepared = _share(loader, sharing, seed)
    if sharing.configuration.use_stateful_dataloader and find_spec("torchdata"):
        prepared.__class__ = of_torchdata(type(prepared))
    return prepared


@cache
def of_torchdata(kind: Any) -> Any:
    """Return a class whose objects scripts take for a loader of torchdata, which they are like."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return type(kind.__name__, (kind, StatefulDataLoader), {})


def _share(loader: Any, sharing: Sharing, seed: int) -> SharedLoader:
    """Return a loader of which every process of `sharing` reads its own batches."""
    from trainkit.accelerator.mapped import MappedShare, drawing_as_torch
    from trainkit.accelerator.streamed import StreamedShare
    from trainkit.data.mapped import MappedLoader

    seeds = sharing.configuration.sample_seeding
    inner = training_loader(
        loader if seeds else drawing_as_torch(loader),
        processes=sharing.processes,
        device=sharing.device,
        moves=sharing.moves,
        seed=rng.derive(seed, "own loop"),
        split_batches=sharing.configuration.split_batches,
        sample_seeding=seeds,
        may_be_empty=True,
    )
    if isinstance(inner, MappedLoader):
        return MappedShare(inner, sharing, seed)
    return StreamedShare(inner, sharing)
