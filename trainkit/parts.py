"""Turns what users pass to a Trainer into its parts, with an error where that cannot work."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.errors import ConfigError
from trainkit.precision import BF16, FP16, FP32, Precision
from trainkit.schedule import LRSchedule
from trainkit.strategies import DDP, SingleDevice, Strategy
from trainkit.types import OptimizerFactory, SchedulerFactory
from trainkit.world import World

__all__ = [
    "check_model",
    "make_lr_schedule",
    "make_optimizer",
    "make_precision",
    "make_strategy",
    "name_loaders",
    "split_loaders",
]

T = TypeVar("T")

STRATEGIES: dict[str, type[Strategy]] = {"single": SingleDevice, "ddp": DDP}
PRECISIONS: dict[str, type[Precision]] = {"fp32": FP32, "bf16": BF16, "fp16": FP16}


def make_strategy(strategy: str | Strategy) -> Strategy:
    """Return the strategy of a name; "auto" is DDP where several processes were launched."""
    if isinstance(strategy, Strategy):
        return strategy
    if strategy == "auto":
        return DDP() if World.from_env().size > 1 else SingleDevice()
    return _look_up("strategy", strategy, STRATEGIES, "Strategy", ("auto",))()


def make_precision(precision: str | Precision) -> Precision:
    """Return the precision plugin of a name."""
    if isinstance(precision, Precision):
        return precision
    return _look_up("precision", precision, PRECISIONS, "Precision")()


def _look_up(
    argument: str,
    name: object,
    known: Mapping[str, type[T]],
    interface: str,
    also: tuple[str, ...] = (),
) -> type[T]:
    if isinstance(name, str) and name in known:
        return known[name]
    names = [*also, *known]
    near = (
        difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.3)
        if isinstance(name, str)
        else []
    )
    hint = f' Did you mean "{near[0]}"?' if near else ""
    if isinstance(name, type):
        hint = f" Pass an instance: `{name.__name__}(...)`."
    raise ConfigError(
        f"`{argument}` must be one of {names} or a `{interface}`, but is {name!r}.{hint}"
    )


def check_model(model: object) -> nn.Module:
    """Return `model` if it can be trained."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`model` must be a `torch.nn.Module`, but is {type(model).__name__!r}.")
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise ConfigError(
            f"`{type(model).__name__}` has no trainable parameters ({len(parameters)} in all). "
            "Set `requires_grad` on what is to be trained."
        )
    return model


def split_loaders(loaders: Any) -> tuple[Any, dict[str, Any]]:
    """Return the training loader and the evaluation loaders by name ("" for the only one)."""
    if isinstance(loaders, Mapping):
        unknown = sorted(map(str, set(loaders) - {"train", "eval"}))
        if unknown or "train" not in loaders:
            raise ConfigError(
                '`loaders` as a mapping must have the key "train" and may have "eval", but has '
                f"{sorted(map(str, loaders))}."
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
                "`optimizer` must be an Optimizer or a callable `params -> Optimizer`, but is "
                f"{type(optimizer).__name__!r}."
            )
        optimizer = optimizer([p for p in module.parameters() if p.requires_grad])
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "The `optimizer` callable must return a `torch.optim.Optimizer`, but returned "
                f"{type(optimizer).__name__!r}."
            )
    check_optimizer(optimizer, module)
    return optimizer


def check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise where the optimizer holds parameters that are not those of `module`."""
    own = {id(p) for p in module.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = [tuple(p.shape) for p in held if id(p) not in own]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} of the {len(held)} parameters of the optimizer are not parameters of "
            f"`{type(module).__name__}` (the first has the shape {foreign[0]}): training would "
            "not change the model. Make the optimizer from `model.parameters()` of the model that "
            "is passed to `fit`, or pass a callable such as `partial(AdamW, lr=3e-4)`."
        )


def make_lr_schedule(
    lr_scheduler: object | SchedulerFactory | None, optimizer: Optimizer
) -> LRSchedule | None:
    """Return the schedule, from a callable `optimizer -> LRScheduler` or as it is."""
    if lr_scheduler is None:
        return None
    if not isinstance(lr_scheduler, LRScheduler | ReduceLROnPlateau | LRSchedule):
        if not callable(lr_scheduler):
            raise ConfigError(
                "`lr_scheduler` must be an LRScheduler or a callable `optimizer -> LRScheduler`, "
                f"but is {type(lr_scheduler).__name__!r}."
            )
        lr_scheduler = lr_scheduler(optimizer)
    if isinstance(lr_scheduler, LRScheduler | ReduceLROnPlateau):
        lr_scheduler = LRSchedule(lr_scheduler)
    if not isinstance(lr_scheduler, LRSchedule):
        raise ConfigError(
            "The `lr_scheduler` callable must return an LRScheduler or an `LRSchedule`, but "
            f"returned {type(lr_scheduler).__name__!r}."
        )
    if lr_scheduler.scheduler.optimizer is not optimizer:
        raise ConfigError(
            "`lr_scheduler` belongs to another optimizer than the one that is used: it would "
            "change nothing. Pass a callable `optimizer -> LRScheduler`."
        )
    return lr_scheduler
