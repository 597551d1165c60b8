"""Turns what users pass as several optimizers into them, with an error where that cannot work."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainkit.basics.config import check_whole
from trainkit.basics.parsing import nearest
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies import Strategy
from trainkit.training.lr_schedule import LRSchedules
from trainkit.training.setup.arguments import check_optimizer, check_override
from trainkit.training.several.optimizers import NamedOptimizer, Optimizers
from trainkit.training.weighting import Weighting
from trainkit.types import Alternating, class_name

__all__ = ["make", "make_optimizers", "make_schedules"]

_STEP = "training_step_"


def make(
    trainer: Any,
    base: type,
    module: nn.Module,
    given: Any,
    weighting: Callable[..., Weighting],
) -> Optimizer:
    """Return the optimizer of a module that the strategy has wrapped; several as one.

    Args:
        trainer: Makes them, and has their steps, a strategy and a precision.
        base: `Trainer`, whose methods a user may have overridden.
        given: What `fit` was given as `optimizer`.
        weighting: Makes the weighting of one, `of` a name.
    """
    names, own = ("configure_optimizer", "configure_optimizers", "training_step"), type(trainer)
    overridden = [name for name in names if getattr(own, name) is not getattr(base, name)]
    strategy, precision = trainer.strategy, trainer.precision
    given, alternate = _taken_apart(given, None)
    if not _are_several(given, overridden):
        check_override(trainer.configure_optimizer, "model, optimizer")
        optimizer = trainer.configure_optimizer(module, given)
        strategy.rebind_optimizer(optimizer, module)
        check_optimizer(optimizer, module)
        precision.bind(optimizer)
        return optimizer  # type: ignore[no-any-return]
    check_override(trainer.configure_optimizers, "model, optimizers")
    made, alternate = _taken_apart(trainer.configure_optimizers(module, given), alternate)
    made = _check_mapping(made)
    for optimizer in made.values():
        strategy.rebind_optimizer(optimizer, module)
        check_optimizer(optimizer, module)
    by_name = {
        name: NamedOptimizer(
            name=name,
            optimizer=made[name],
            precision=_own_scale(precision, strategy, made[name]),
            weighting=weighting(of=name),
            parameter_names=held,
        )
        for name, held in _names_of(made, module).items()
    }
    _set_steps(trainer, by_name, alternate)
    # Steps by name return the loss of one, and the default step that of all.
    together = False if alternate is not None else None if "training_step" in overridden else True
    optimizers = Optimizers(by_name, alternate, together)
    precision.bind(optimizers)
    return optimizers


def _taken_apart(given: Any, windows: Any) -> tuple[Any, Any]:
    """Return optimizers, and the windows in a row of those that take turns, else `windows`."""
    return (given.optimizers, given.windows) if isinstance(given, Alternating) else (given, windows)


def _are_several(given: Any, overridden: list[str]) -> bool:
    how = ["`optimizer={...}`"] if isinstance(given, Mapping) else []
    how += ["`configure_optimizers`"] if "configure_optimizers" in overridden else []
    if how and "configure_optimizer" in overridden:
        raise ConfigError(
            f"`configure_optimizer` makes one optimizer, but there are several, by {how[-1]}. "
            "Leave out one of both."
        )
    return bool(how)


def _own_scale(precision: Precision, strategy: Strategy, optimizer: Optimizer) -> Precision:
    own = copy.deepcopy(precision)
    own.setup(strategy.device)
    own.bind(optimizer)
    return own


def _names_of(made: Mapping[str, Optimizer], module: nn.Module) -> dict[str, frozenset[str]]:
    """Return the names of the parameters of each optimizer."""
    names = {id(p): name for name, p in module.named_parameters()}
    owners: dict[str, str] = {}
    for owner, optimizer in made.items():
        for parameter in (names[id(p)] for g in optimizer.param_groups for p in g["params"]):
            if owners.setdefault(parameter, owner) != owner:
                raise ConfigError(
                    f"The optimizers `{owners[parameter]}` and `{owner}` share parameters, such as "
                    f"`{parameter}`: both would update them. Give each parameter to one."
                )
    return {name: frozenset(p for p, own in owners.items() if own == name) for name in made}


def _set_steps(trainer: Any, optimizers: Mapping[str, NamedOptimizer], alternate: Any) -> None:
    """Give each optimizer its step, where they take turns."""
    steps = [key for key in dir(type(trainer)) if key.startswith(_STEP)]
    if alternate is not None:
        _check_alternate(alternate, optimizers, steps, trainer)
        for name, each in optimizers.items():
            each.training_step = getattr(trainer, _STEP + name)
    elif steps:
        raise ConfigError(
            f"`{type(trainer).__name__}` has {quoted(steps)}, which nothing would call. Pass "
            '`optimizer=Alternating({...}, {"a": 5, "b": 1})`, with the windows in a row of each.'
        )


def make_optimizers(given: Any, module: nn.Module) -> dict[str, Optimizer]:
    """Return optimizers by name, from those that are made and from callables.

    Args:
        given: By name; a callable gets the parameters of the part of the model that has the name,
            or the parameter of this name.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            "Several optimizers are a mapping from names to optimizers, but `optimizer` is "
            f"{type(given).__name__!r}. Pass `optimizer={{...}}` to `fit`, or return one from "
            "`configure_optimizers`."
        )
    made = {}
    for name, optimizer in given.items():
        if callable(optimizer) and not isinstance(optimizer, Optimizer):
            parts = {n: [*part.parameters()] for n, part in module.named_modules() if n}
            parts |= {n: [p] for n, p in module.named_parameters(recurse=False)}
            if name not in parts:
                raise ConfigError(
                    f"The optimizer {name!r} is a callable, which gets the parameters of the part "
                    f"of the model of this name, but `{class_name(module)}` has none. Its parts "
                    f"are {quoted([key for key in parts if '.' not in key])}. Pass an optimizer "
                    "that is made, with its parameters."
                )
            trained = [p for p in parts[name] if p.requires_grad]
            if not trained:
                raise ConfigError(
                    f"The optimizer `{name}` has nothing to train: no parameter of this part of "
                    "the model has `requires_grad`. Leave it out, or freeze it by `FreezeUntil`."
                )
            optimizer = optimizer(trained)
        made[name] = optimizer
    return made


def _check_mapping(made: Any) -> Mapping[str, Optimizer]:
    if not isinstance(made, Mapping) or len(made) < 2:
        what = f"{len(made)} of them" if isinstance(made, Mapping) else f"{type(made).__name__!r}"
        raise ConfigError(
            f"Several optimizers are a mapping of at least two, but it is {what}. For one "
            "optimizer pass `optimizer=` as it is, or override `configure_optimizer`."
        )
    for name, optimizer in made.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(
                f"Optimizers are named by words such as `generator`, but one is called {name!r}."
            )
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"The optimizer {name!r} must be a `torch.optim.Optimizer`, or in `fit` a callable "
                f"`params -> Optimizer`, but is {type(optimizer).__name__!r}."
            )
    return made


def _check_alternate(
    alternate: Any, optimizers: Mapping[str, object], steps: list[str], trainer: object
) -> None:
    if not isinstance(alternate, Mapping) or set(alternate) != set(optimizers):
        given = [*alternate] if isinstance(alternate, Mapping) else alternate
        raise ConfigError(
            "`Alternating` says of each optimizer how many windows in a row it gets, such as "
            f"`{{{', '.join(f'{name!r}: 1' for name in optimizers)}}}`, but names {given!r}; the "
            f"optimizers are {quoted([*optimizers])}."
        )
    for name, count in alternate.items():
        check_whole(f"Alternating(...).windows[{name!r}]", count)
        if _STEP + name not in steps:
            raise ConfigError(
                f"`Alternating` names `{name}`, so `{type(trainer).__name__}` needs a method "
                f"`{_STEP}{name}(self, model, batch)`, which returns the loss of that optimizer."
            )
    unknown = [step for step in steps if step.removeprefix(_STEP) not in alternate]
    if unknown:
        raise ConfigError(
            f"`{type(trainer).__name__}.{unknown[0]}` is the step of no optimizer: they are "
            f"{quoted([*optimizers])}.{nearest(unknown[0], [_STEP + name for name in optimizers])}"
        )


def make_schedules(
    make: Callable[..., Any],
    given: Any,
    warmup: float,
    optimizers: Optimizer,
    planned_steps: int | None,
) -> LRSchedules | None:
    """Return the schedules of several optimizers; None where there is one.

    Args:
        make: Makes the schedule of one, from its share of the other arguments.
        given: By name, or the same for all.
        warmup: Of those by name.
        optimizers: One, or several as one.
        planned_steps: Windows that will be trained on.
    """
    if not isinstance(optimizers, Optimizers):
        return None
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(optimizers.by_name, given)
    unknown = [name for name in by_name if name not in optimizers.by_name]
    if unknown:
        raise ConfigError(
            f"`lr_scheduler` names {unknown[0]!r}, but the optimizers are "
            f"{quoted([*optimizers.by_name])}."
        )
    made = {
        name: make(
            own, warmup, optimizers.by_name[name].optimizer, optimizers.planned(name, planned_steps)
        )
        for name, own in by_name.items()
    }
    return LRSchedules({name: each for name, each in made.items() if each}, optimizers)
