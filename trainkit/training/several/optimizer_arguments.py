"""Turns what users pass as several optimizers into them, with an error where that cannot work."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from trainkit.basics.config import TrainConfig, check_whole
from trainkit.basics.parsing import nearest
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies import Strategy
from trainkit.training.lr_schedule import LRSchedule, LRSchedules
from trainkit.training.objectives import Objective, Objectives
from trainkit.training.setup.arguments import check_optimizer, check_override
from trainkit.training.several.objectives import ByName, NamedObjective, OneLoss, Turns
from trainkit.training.several.optimizers import Optimizers
from trainkit.training.weighting import Weighting
from trainkit.types import Alternating, class_name

_STEP = "training_step_"


class Configures(Protocol):
    """A trainer, as far as it makes optimizers."""

    config: TrainConfig
    strategy: Strategy
    precision: Precision

    def configure_optimizer(self, model: nn.Module, optimizer: Any) -> Optimizer:
        """Return one."""

    def configure_optimizers(
        self, model: nn.Module, optimizers: Any
    ) -> Mapping[str, Optimizer] | Alternating:
        """Return several by name."""


def make(
    trainer: Configures,
    overridden: Callable[[str], bool],
    given: Any,
    module: nn.Module,
    model: nn.Module,
    weighting: Callable[[str], Weighting],
) -> tuple[Optimizer, Objectives]:
    """Return the optimizer of a module that the strategy has wrapped, several as one, and its aims.

    Args:
        trainer: Makes them, and has the steps of those that take turns.
        overridden: Whether the user has written a method of it.
        given: What `fit` was given as `optimizer`.
        module: The user's own.
        model: What the strategy made of it.
        weighting: Makes what weighs the losses of one of several, by its name; "" of all.
    """
    strategy, precision = trainer.strategy, trainer.precision
    given, windows = _taken_apart(given, None)
    how = ["`optimizer={...}`"] if isinstance(given, Mapping) else []
    how += ["`configure_optimizers`"] if overridden("configure_optimizers") else []
    if how and overridden("configure_optimizer"):
        raise ConfigError(
            f"`configure_optimizer` makes one optimizer, but there are several, by {how[-1]}. "
            "Leave out one of both."
        )
    if how:
        check_override(trainer.configure_optimizers, "model, optimizers")
        made, windows = _taken_apart(trainer.configure_optimizers(module, given), windows)
        made = _check_mapping(made)
    else:
        check_override(trainer.configure_optimizer, "model, optimizer")
        made = {"": trainer.configure_optimizer(module, given)}
    for optimizer in made.values():
        strategy.rebind_optimizer(optimizer, module)
        check_optimizer(optimizer, module)
    optimizer = Optimizers(made, windows) if how else made[""]
    of_all = Objective(
        optimizer=optimizer, precision=precision, weighting=weighting(""), model=model
    )
    if not how:
        precision.bind(optimizer)
        return optimizer, Objectives(of_all)
    by_name = {}
    for name, held in _names_of(made, module).items():
        own_scale = copy.deepcopy(precision)
        own_scale.setup(strategy.device)
        own_scale.bind(made[name])
        by_name[name] = NamedObjective(
            name=name,
            optimizer=made[name],
            precision=own_scale,
            weighting=weighting(name),
            model=module,
            parameter_names=held,
        )
    precision.bind(optimizer)
    _set_steps(trainer, by_name, windows)
    if windows is not None:
        return optimizer, Turns(of_all, by_name, windows)
    if overridden("training_step"):
        recomputes = bool(getattr(strategy, "activation_checkpointing", False))
        recomputes |= bool(trainer.config.gradient_checkpointing)
        return optimizer, ByName(of_all, by_name, one_backward=recomputes)
    return optimizer, OneLoss(of_all, by_name)  # the default step returns it


def _taken_apart(given: Any, windows: Any) -> tuple[Any, Any]:
    """Return optimizers, and the windows in a row of those that take turns, else `windows`."""
    return (given.optimizers, given.windows) if isinstance(given, Alternating) else (given, windows)


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


def _set_steps(trainer: object, optimizers: Mapping[str, NamedObjective], alternate: Any) -> None:
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
    make: Callable[[Any, Optimizer, int | None], LRSchedule | None],
    given: Any,
    objectives: Objectives,
    planned_steps: int | None,
) -> LRSchedules | None:
    """Return the schedules of several optimizers; None where none has one.

    Args:
        make: Makes the schedule of one, from its share of the other arguments.
        given: By name, or the same for all.
        planned_steps: Windows that will be trained on.
    """
    optimizers = objectives.by_name
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(optimizers, given)
    unknown = [name for name in by_name if name not in optimizers]
    if unknown:
        raise ConfigError(
            f"`lr_scheduler` names {unknown[0]!r}, but the optimizers are {quoted([*optimizers])}."
        )
    made = {
        name: make(own, optimizers[name].optimizer, objectives.planned(name, planned_steps))
        for name, own in by_name.items()
    }
    schedules = {name: each for name, each in made.items() if each}
    return LRSchedules(schedules, objectives) if schedules else None
