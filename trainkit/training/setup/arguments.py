"""Turns what users pass to a Trainer into its parts, with an error where that cannot work."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from trainkit import precision as precisions, strategies
from trainkit.basics.config import TrainConfig, check_argument
from trainkit.data import PreparedLoader
from trainkit.distributed.world import World
from trainkit.errors import ConfigError
from trainkit.lazy import ask
from trainkit.metrics.metric import Metric
from trainkit.precision import Precision
from trainkit.strategies import DDP, SingleDevice, Strategy
from trainkit.types import LossFn, OptimizerFactory, Stateful, class_name

T = TypeVar("T")
_RESUMES = ("auto", "must")

StrategyName: TypeAlias = Literal["auto", "single", "ddp", "fsdp", "model_parallel", "deepspeed"]
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "single": SingleDevice,
    "ddp": DDP,
    "fsdp": lambda **options: strategies.FSDP(**options),  # imported by whoever uses it
    "model_parallel": lambda **options: strategies.ModelParallel(**options),
    "deepspeed": lambda **options: strategies.DeepSpeed(**options),
}
COMPILED = "_orig_mod"  # what `torch.compile(module)` calls the module that it wraps
PRECISIONS: dict[str, Callable[[], Precision]] = {
    "fp32": lambda: precisions.FP32(),
    "bf16": lambda: precisions.BF16(),
    "fp16": lambda: precisions.FP16(),
    "fp8": lambda: precisions.FP8(),
}


def make_strategy(strategy: str | Strategy) -> Strategy:
    """Return the strategy of a name; "auto" is what the launcher asks for, or DDP."""
    if isinstance(strategy, Strategy):
        return strategy
    from trainkit.basics import launch_environment  # importing trainkit needs none of it
    from trainkit.basics.parsing import boolean

    options: dict[str, Any] = {"device": "cpu" if launch_environment.uses_cpu() else None}
    if strategy == "auto":
        strategy = "ddp" if World.from_env().size > 1 else "single"
        if (asked := launch_environment.sharding()) is not None:
            strategy, options = "fsdp", options | asked
        if launch_environment.read("USE_DEEPSPEED", boolean, False):
            strategy = "deepspeed"
    return _look_up("strategy", strategy, STRATEGIES, "Strategy")(**options)


def make_precision(precision: str | Precision) -> Precision:
    """Return the precision plugin of a name; "auto" is what the launcher asks for."""
    if isinstance(precision, Precision):
        return precision
    if precision == "auto":
        from trainkit.basics import launch_environment

        precision = launch_environment.MIXED_PRECISIONS[launch_environment.mixed_precision()]
    return _look_up("precision", precision, PRECISIONS, "Precision")()


def set_up(strategy: str | Strategy, precision: str | Precision) -> tuple[Strategy, Precision]:
    """Return a strategy that has joined its processes, and a precision bound to its device."""
    plugin, chosen = make_precision(precision), make_strategy(strategy)
    chosen.setup()
    plugin.setup(chosen.device)
    return chosen, plugin


def _look_up(
    argument: str, name: object, known: Mapping[str, Callable[..., T]], interface: str
) -> Callable[..., T]:
    if isinstance(name, str) and name in known:
        return known[name]
    names = ["auto", *known]
    hint = ""
    if isinstance(name, str):
        from trainkit.basics.parsing import nearest  # only errors need it

        bare = name.lower().removesuffix("-mixed").removesuffix("-true")
        hint = nearest({"16": "fp16", "32": "fp32"}.get(bare, bare), names)
    elif isinstance(name, type):
        hint = f" Pass an instance: `{name.__name__}(...)`."
    raise ConfigError(
        f"`{argument}` must be one of {names} or a `{interface}`, but is {name!r}.{hint}"
    )


def warn_of_shuffling(loader: Any) -> None:
    """Warn where what `predict` returns cannot be matched with the rows of the data set."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        warnings.warn(
            "`predict` returns what it says in the loader's order, and this loader draws it: row 0 "
            "is not that of the data set's first sample. Pass one with `shuffle=False`.",
            stacklevel=4,
        )


def warn_of_settings(config: TrainConfig, attributes: Mapping[str, Any]) -> None:
    """Warn where a trainer has an attribute of the name of a setting, which has another value."""
    kinds = (NoneType, int, float, str)
    held = {each.name: attributes[each.name] for each in fields(config) if each.name in attributes}
    for name, value in held.items():
        if isinstance(value, kinds) and value != (counts := getattr(config, name)):
            warnings.warn(
                f"`trainer.{name}` is {value!r}, but `fit` goes by the `{name}={counts!r}` with "
                f"which the trainer was made. Make one with `{name}={value!r}`; if the attribute "
                "is yours and means something else, give it another name.",
                stacklevel=5,
            )


def warn_of_nothing() -> None:
    """Warn of an evaluation that computes nothing."""
    warnings.warn(
        "`evaluate` had nothing to compute: it was given neither `metrics` nor `loss_fn`, and the "
        "model returns no loss.",
        stacklevel=3,
    )


def check_model(model: object) -> nn.Module:
    """Return `model` if it can be trained."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be a `torch.nn.Module`, but is {type(model).__name__!r}.")
    check_initialised(model)
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise ConfigError(
            f"`{class_name(model)}` has no trainable parameters ({len(parameters)} in all). "
            "Set `requires_grad` on what is to be trained."
        )
    compiled = [name for name, _ in model.named_modules() if name.endswith(COMPILED)]
    if compiled:
        module = compiled[0].removesuffix(COMPILED).removesuffix(".")
        raise ConfigError(
            f"{f'`{module}` of the model' if module else 'The model'} was wrapped by "
            f"`torch.compile(...)`, which puts `{COMPILED}` into the names of its parameters, and "
            "so into checkpoints. Pass it unwrapped, with `Trainer(compile=True)`, or compile a "
            "part of it in place by `part.compile()`."
        )
    return model


def hold_weights(model: nn.Module) -> None:
    """Keep weights in 4 bits as they are, from here on."""
    from trainkit.basics.quantized import hold_quantized  # on demand

    hold_quantized(model)


def check_initialised(model: nn.Module) -> None:
    """Raise where modules, such as `nn.LazyLinear`, wait for a batch to know their shapes."""
    hold_weights(model)
    for name, module in model.named_modules():
        lazy: Any = module
        if isinstance(module, LazyModuleMixin) and lazy.has_uninitialized_params():
            raise ConfigError(
                f"{f'`{name}` of the model' if name else 'The model'} is a "
                f"`{class_name(lazy)}` whose parameters have no shapes yet. Run one batch "
                "through the model before it is passed on, for example `model(inputs)`."
            )


def split_loaders(loaders: Any) -> tuple[Any, dict[str, Any]]:
    """Return the training loader and the evaluation loaders by name ("" for the only one)."""
    if isinstance(loaders, Mapping):
        unknown = sorted(map(str, set(loaders) - {"train", "eval"}))
        if unknown or "train" not in loaders:
            raise ConfigError(
                '`loaders` as a mapping must have the key "train" and may have "eval", but has '
                f"{sorted(map(str, loaders))}. Several training loaders are `Combined`."
            )
        return loaders["train"], name_loaders(loaders.get("eval"))
    if isinstance(loaders, tuple):
        if len(loaders) != 2:
            raise ConfigError(
                "`loaders` as a tuple must be `(train, eval)`, but has "
                f"{len(loaders)} entries. Name several evaluation loaders: "
                '`{"train": ..., "eval": {"a": ..., "b": ...}}`.'
            )
        return loaders[0], name_loaders(loaders[1])
    if isinstance(loaders, list) and any(isinstance(loader, DataLoader) for loader in loaders):
        raise ConfigError(
            f"`loaders` is a list of {len(loaders)} loaders. Pass one loader, a tuple "
            '`(train, eval)`, or a mapping with "train" and "eval"; several training loaders are '
            '`Combined({"a": ..., "b": ...}, "max_cycle")`.'
        )
    return loaders, {}


def name_loaders(loaders: Any) -> dict[str, Any]:
    """Return evaluation loaders by name; the only one is called ""."""
    if loaders is None:
        return {}
    if not isinstance(loaders, Mapping):
        return {"": loaders}
    bad = [name for name in loaders if not isinstance(name, str) or not name or "/" in name]
    if bad:
        raise ConfigError(
            f"Evaluation loaders are named by words without `/`, but one is called {bad[0]!r}."
        )
    return dict(loaders)


def check_one_loader(loader: Any) -> Any:
    """Return the loader of a `predict`, which takes one."""
    if isinstance(loader, Mapping):
        raise ConfigError(
            "`predict` takes one loader, but got a mapping. Call it once for each: "
            "`{name: trainer.predict(model, each) for name, each in loaders.items()}`."
        )
    return loader


def check_evaluations(loaders: Mapping[str, PreparedLoader]) -> None:
    """Raise where an evaluation during training would have nothing to look at."""
    for name, loader in loaders.items():
        if loader.samples_per_epoch == 0 or loader.batches_per_epoch == 0:
            raise ConfigError(
                f"The evaluation loader{f' `{name}`' if name else ''} is empty, so `fit` could "
                "never give a metric. Give it samples, or leave it out."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FitSettings:
    """What `Trainer.fit` was given beside a model and loaders; how it begins is checked."""

    optimizer: Any = None
    lr_scheduler: Any = None
    warmup: float = 0
    loss_fn: LossFn | None = None
    resume: str | Path | None = None
    """A path is made an absolute one."""
    schedule: Literal["keep", "rescale"] | None = None
    restore_best: bool = False

    def __post_init__(self) -> None:
        resume: Any = self.resume
        schedule = self.schedule
        check_argument("restore_best", self.restore_best, bool)
        if schedule not in (None, "keep", "rescale"):
            raise ConfigError(f'`schedule` must be "keep" or "rescale", but is {schedule!r}.')
        if schedule is not None and resume is None:
            raise ConfigError(
                f'`schedule="{schedule}"` says how to resume, but `resume` was not given. Pass '
                '`resume="auto"`, or leave it out.'
            )
        if not isinstance(resume, str | Path | None) or resume == "":
            wanted = 'None, "auto", "must" or the folder of a checkpoint'
            raise ConfigError(f"`resume` must be {wanted}, but is {resume!r}.")
        if resume is not None and resume not in _RESUMES:
            from trainkit.basics.outputs import absolute  # most runs need none of it
            from trainkit.basics.parsing import nearest

            hint = nearest(str(resume), _RESUMES)
            if hint and not Path(str(resume)).exists():
                raise ConfigError(f"`resume={str(resume)!r}` is no folder of a checkpoint.{hint}")
            object.__setattr__(self, "resume", absolute(resume, "resume", stored=True))


def read_hparams(given: Any) -> dict[str, Any]:
    """Return hyperparameters in plain values; raise where some cannot be written."""
    if given is None:
        return {}
    from trainkit.basics.hparams import plain  # many runs have none

    return plain(given)


def check_new_run(new_run: bool, output_dir: object) -> bool:
    """Return whether each run gets a folder of its own; raise where that has no place."""
    check_argument("new_run", new_run, bool)
    if new_run and output_dir is None:
        raise ConfigError(
            "`new_run=True` gives each run a folder of its own in the output directory, but the "
            'trainer has none. Pass `Trainer(output_dir="runs/x", new_run=True)`.'
        )
    return new_run


def check_stateful(name: str, part: object, known: Mapping[str, object]) -> None:
    """Raise where `part` cannot be registered for checkpointing under `name`."""
    if isinstance(part, type) or not isinstance(part, Stateful):
        raise ConfigError(
            f"`{name}` was registered for checkpointing, but {type(part).__name__!r} has no "
            "`state_dict` and `load_state_dict`. Give it both."
        )
    if name in known:
        raise ConfigError(
            f"Two objects were registered for checkpointing as {name!r}. Name one of them: "
            f"`register_for_checkpointing({name.lower()}_2=...)`."
        )
    from trainkit.checkpoint.format.codec import encode  # runs without checkpoints need none of it
    from trainkit.checkpoint.resharding.sharding import split

    whole, _ = split({name: part.state_dict()}, rank=0)  # as it is saved: without `DTensor`s
    encode(whole[name], name)


def make_metrics(metrics: Iterable[Any] | None) -> list[Metric]:
    """Return the metrics of names, functions, and objects of `evaluate` and torchmetrics."""
    if isinstance(metrics, str) or (metrics is not None and not isinstance(metrics, Iterable)):
        raise ConfigError(
            f"`metrics` must be a list, but is {metrics!r}. Write `metrics=[{metrics!r}]`."
        )
    return [ask("as_metric")(metric) for metric in metrics or ()]


def check_callbacks(callbacks: object) -> None:
    """Raise where `callbacks` is one callback instead of a list."""
    if callbacks is None:
        return
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise ConfigError(
            f"`callbacks` must be a list of callbacks, but is {type(callbacks).__name__!r}. Write "
            "`callbacks=[...]`."
        )


def check_compile(
    setting: bool | Mapping[str, Any], device: torch.device, *, accumulates: bool
) -> dict[str, Any] | None:
    """Return the options of torch.compile that were asked for; None: nothing is compiled."""
    if setting is False:
        return None
    from trainkit.training.setup.compile import compile_options  # most runs need none of it

    return compile_options(setting, device, accumulates=accumulates)


def check_override(method: Callable[..., Any], given: str) -> None:
    """Refuse a method of a user's `Trainer` that does not take what it is called with.

    Args:
        method: Bound to the trainer.
        given: The names of its arguments, the last of which is what `fit` was given.
    """
    try:
        inspect.signature(method).bind(*given.split(", "))
    except TypeError as error:
        name = getattr(method, "__name__", "")
        raise ConfigError(
            f"`{name}` is called with ({given}), but yours does not take them ({error}). Write "
            f"`def {name}(self, {given})`; the last is what `fit` was given, or None."
        ) from None


def make_optimizer(optimizer: Optimizer | OptimizerFactory | None, module: nn.Module) -> Optimizer:
    """Return the optimizer of `module`, from a callable `params -> Optimizer` or as it is."""
    if optimizer is None:
        raise ConfigError(
            "No optimizer was given. Pass `optimizer=` to `fit`, for example "
            "`partial(torch.optim.AdamW, lr=3e-4)`, or override `configure_optimizer`."
        )
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise ConfigError(
                "`optimizer` must be an Optimizer, a callable `params -> Optimizer`, or several of "
                f"them by name, `{{'a': ..., 'b': ...}}`, but is {type(optimizer).__name__!r}."
            )
        try:
            optimizer = optimizer([p for p in module.parameters() if p.requires_grad])
        except TypeError as error:
            if "'str'" in str(error):
                error.add_note(
                    "trainkit: the `optimizer` callable was given text where it needs a number. "
                    'YAML reads `lr: 1e-3` as text: write `1.0e-3`, or `float("1e-3")`.'
                )
            raise
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "The `optimizer` callable must return a `torch.optim.Optimizer`, but returned "
                f"{type(optimizer).__name__!r}."
            )
    return optimizer


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise where the optimizer cannot train `module`."""
    own = {id(p) for p in module.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.requires_grad for p in held):
        raise ConfigError(
            f"None of the {len(held)} parameters of the optimizer is trainable "
            "(`requires_grad`): training would change nothing. Give it the parameters to train."
        )
    foreign = [tuple(p.shape) for p in held if id(p) not in own]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} of the {len(held)} parameters of the optimizer are not parameters of "
            f"`{class_name(module)}` (the first has the shape {foreign[0]}): training would "
            "not change the model. Make the optimizer from `model.parameters()` of the model that "
            "is passed to `fit`, or pass a callable such as `partial(AdamW, lr=3e-4)`. What else "
            "is learned, such as a temperature, must be an `nn.Parameter` in the model, and a loss "
            "that learns a part of it: `self.loss_fn = ...` in its constructor, then "
            "`fit(..., loss_fn=model.loss_fn)`."
        )


def check_steps(kind: type, default: type) -> None:
    """Raise where a step of a `Trainer` has other arguments; warn of one that is never called."""
    for name in ("training_step", "evaluation_step"):
        step = getattr(kind, name)
        names = [*inspect.signature(step).parameters][1:]
        if names[:1] == ["batch"] or names[1:2] == ["batch_idx"]:
            raise ConfigError(
                f"`{kind.__name__}.{name}({', '.join(['self', *names])})` is called with the model "
                f"and the batch. Write `def {name}(self, model, batch)`, and call `model(...)`; "
                "how far the run is stands in `self.run.state`."
            )
    unknown = [name for name in ("validation_step", "test_step") if hasattr(kind, name)]
    if unknown and kind.evaluation_step is default.evaluation_step:  # type: ignore[attr-defined]
        warnings.warn(
            f"`{kind.__name__}.{unknown[0]}` is never called: here that step is called "
            "`evaluation_step(self, model, batch)`, for `evaluate`, `test` and `fit`. Rename it.",
            stacklevel=4,
        )


def missing_attribute(kind: type, name: str) -> str:
    """Return what to say of an attribute that a trainer does not have."""
    others = {
        "log": '`self.run.log({"name": value})`',
        "log_dict": "`self.run.log(values)`",
        "model": "the argument `model` of the step; the module that `fit` was given is "
        "`self.run.module`",
        "optimizer": "`self.run.optimizer`",
        "device": "`self.processes.device`",
        "global_step": "`self.run.state.step`",
        "current_epoch": "`self.run.state.epoch`",
        "trainer": "the trainer itself, `self`",
    }
    hint = f" Here that is {others[name]}." if name in others else ""
    return f"{kind.__name__!r} object has no attribute {name!r}.{hint}"


def planned_steps(config: TrainConfig, loader: PreparedLoader) -> int | None:
    """Return the updates that a fit will apply; None where that is not known ahead."""
    per_epoch = loader.steps_per_epoch(config.gradient_accumulation_steps, config.drop_last_window)
    if per_epoch == 0:
        raise ConfigError(
            f"0 training steps per epoch: the loader gives {loader.batches_per_epoch} "
            "micro-batches to each process, `gradient_accumulation_steps` is "
            f"{config.gradient_accumulation_steps} and `drop_last_window` is True. Accumulate "
            "less, or keep the last window."
        )
    if config.max_steps is not None:
        return config.max_steps
    assert config.max_epochs is not None
    return None if per_epoch is None else per_epoch * config.max_epochs
