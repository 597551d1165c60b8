"""Several optimizers of one training, each under a name; together they look like one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.training.weighting import Weighting, loss_of, parse
from trainkit.types import StepOutput

__all__ = [
    "NamedOptimizer",
    "Optimizers",
    "Weight",
    "described",
    "loss_given",
    "refuse_several",
    "take_loss",
]


Weight: TypeAlias = Tensor | float | None
"""How much a loss counts; None: the samples of its micro-batch."""


@dataclass(kw_only=True, eq=False, slots=True)
class NamedOptimizer:
    """One of the optimizers of a training, and what it has for itself."""

    name: str
    optimizer: Optimizer
    precision: Precision  # with a loss scale of its own
    weighting: Weighting
    parameter_names: frozenset[str]  # of its parameters, in the model
    model: nn.Module | None = None
    """What `finish_reduction` returned for these alone; None before its first window."""
    training_step: Callable[[nn.Module, Any], Any] | None = None  # where optimizers take turns
    steps: int = 0
    """Updates that it has applied."""
    skipped_steps: int = 0
    """Windows for it that ended without its update."""
    consecutive_skips: int = 0
    """Skipped windows since its last update."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What it updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, but for the state of the optimizer itself."""
        counters = {name: getattr(self, name) for name in COUNTERS}
        return counters | {"precision": self.precision.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.precision.load_state_dict(state["precision"])


COUNTERS = ("steps", "skipped_steps", "consecutive_skips")


class Optimizers(Optimizer):
    """Several optimizers as one, for all that saves, compares and watches an optimizer.

    The groups are those of the optimizers one after the other, the same objects; the state of each
    parameter lies with its optimizer.

    Args:
        by_name: In the order in which they are updated.
        alternate: How many windows in a row each one gets, in the order of the turns. None: they
            do not take turns.
        together: Whether one loss is that of all of them; None: the first step will tell.
    """

    def __init__(
        self,
        by_name: Mapping[str, NamedOptimizer],
        alternate: Mapping[str, int] | None,
        together: bool | None,
    ) -> None:
        self.by_name, self.alternate, self.together = dict(by_name), alternate, together
        self.losses: dict[str, dict[str, StepOutput]] | None = None
        """What `run.optimize` was given in the micro-batch under way, by optimizer and loader, ""
        where that was left out; None outside of a step."""
        for name, optimizer in self._parts():
            groups = optimizer.param_groups
            for number, group in enumerate(groups):  # by which learning rates are logged
                group.setdefault("name", name if len(groups) == 1 else f"{name}/{number}")
            for switch in ("train", "eval"):  # as schedule-free ones have
                if callable(getattr(optimizer, switch, None)):
                    setattr(self, switch, lambda switch=switch: self._switch(switch))

    def _parts(self) -> Iterator[tuple[str, Optimizer]]:
        return ((name, each.optimizer) for name, each in self.by_name.items())

    def _switch(self, switch: str) -> None:
        for _, optimizer in self._parts():
            getattr(optimizer, switch, lambda: None)()

    @property
    def described(self) -> str:
        """Names and classes, and the turns."""
        classes = ", ".join(f"{name}: {type(part).__name__}" for name, part in self._parts())
        turns = (f"{count} x {name}" for name, count in (self.alternate or {}).items())
        return classes + (f"; in turns of {', '.join(turns)}" if self.alternate else "")

    def turn(self, windows: int) -> NamedOptimizer | None:
        """Return whose turn it is after so many windows; None where they do not take turns."""
        if self.alternate is None:
            return None
        turns = [name for name, count in self.alternate.items() for _ in range(count)]
        return self.by_name[turns[windows % len(turns)]]

    def planned(self, name: str, windows: int | None) -> int | None:
        """Return how many of the first so many windows are for one of them."""
        if windows is None or self.alternate is None:
            return windows
        rounds, rest = divmod(windows, sum(self.alternate.values()))
        begun = sum(self.turn(window) is self.by_name[name] for window in range(rest))
        return rounds * self.alternate[name] + begun

    def take(self, name: object, loss: object, weight: Weight, loader: str) -> None:
        """Keep a loss until the step has returned."""
        if self.losses is None:
            why = (
                "is for a `training_step`, while it runs"
                if self.alternate is None and not self.together
                else f"was called by a step that returns the loss: {self.described}"
            )
            raise ConfigError(
                f"`run.optimize` {why}. A step either returns the loss, or gives one to "
                "`run.optimize` for each optimizer."
            )
        if name not in self.by_name:
            raise ConfigError(
                f"`run.optimize` was given the name {name!r}, but the optimizers are "
                f"{quoted([*self.by_name])}."
            )
        if isinstance(loss, Mapping) and "loss" not in loss and weight is None and not loader:
            for term, each in loss.items():  # as under the names of loaders
                self.take(name, *parse(each), term)
            return
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            raise ConfigError(
                f"`run.optimize({name!r}, loss)` needs a tensor of one element with a graph, but "
                f"was given {_describe(loss)}. Pass the mean loss itself, not `loss.item()`."
            )
        own = self.losses.setdefault(str(name), {})
        before = own.get(loader)
        if before is not None and weight is not None:
            raise ConfigError(
                f"`run.optimize({name!r}, ...)` was given a weight with a second loss of the same "
                "micro-batch. Losses of one optimizer are added there, and the sum has the weight "
                "that was given with the first."
            )
        if own and ("" in own) == bool(loader):
            raise ConfigError(
                f"`run.optimize({name!r}, ...)` was given a loss with a name, of a loader or of a "
                'term, and one without. Name each, as in `loader="a"`, or none.'
            )
        loss = loss.reshape(())
        own[loader] = (
            StepOutput(loss, weight)
            if before is None
            else StepOutput(before.loss + loss, before.weight)
        )

    def owner_of(self, parameter: Tensor) -> Optimizer:
        """Return the optimizer that has a parameter."""
        return next(
            part
            for _, part in self._parts()
            if any(p is parameter for group in part.param_groups for p in group["params"])
        )

    def training_state(self) -> dict[str, Any]:
        """Return what must survive a restart beside `state_dict`."""
        by_name = {name: each.state_dict() for name, each in self.by_name.items()}
        return {"together": self.together, "by_name": by_name}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `training_state` returned."""
        self.together = state["together"]
        for name, each in self.by_name.items():
            each.load_state_dict(state["by_name"][name])

    # What an optimizer has.

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, one after the other."""
        return [group for _, part in self._parts() for group in part.param_groups]

    @property
    @override
    def state(self) -> Any:  # type: ignore[override]
        """The states of all parameters."""
        return _States([part for _, part in self._parts()])

    @property
    @override
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings of each, by its name."""
        return {name: part.defaults for name, part in self._parts()}

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, part in self._parts():
            part.step()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, part in self._parts():
            part.zero_grad(set_to_none)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigError(
            "Several optimizers are not given parameters later. Give each all that it will train "
            "from the start, and freeze by `FreezeUntil` what it is to train later."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        states: dict[int, Any] = {}
        packed: dict[str, Any] = {"state": states, "param_groups": []}
        first = 0
        for name, part in self._parts():
            own = part.state_dict()
            groups, state = own.pop("param_groups"), own.pop("state")
            for group in groups:
                numbers = [first + number for number in group["params"]]
                packed["param_groups"].append({**group, "params": numbers})
            states |= {first + k: v for k, v in state.items() if isinstance(k, int)}
            rest = {k: v for k, v in state.items() if not isinstance(k, int)}
            if own or rest:
                packed[f"optimizer {name}"] = {"keys": own, "state": rest}
            first += sum(len(group["params"]) for group in groups)
        return packed

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = iter(state_dict["param_groups"])
        for name, part in self._parts():
            own = [next(groups) for _ in part.param_groups]
            numbers = chain.from_iterable(group["params"] for group in own)
            states = {n: state_dict["state"][n] for n in numbers if n in state_dict["state"]}
            rest = state_dict.get(f"optimizer {name}", {"keys": {}, "state": {}})
            part.load_state_dict(
                {**rest["keys"], "state": states | rest["state"], "param_groups": own}
            )


class _States(MutableMapping[Tensor, Any]):
    """The states of the parameters of several optimizers; each lies where it belongs."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._states: list[Any] = [optimizer.state for optimizer in optimizers]

    @override
    def __getitem__(self, key: Tensor) -> Any:
        for states in self._states:
            if key in states:
                return states[key]
        raise KeyError(key)

    @override
    def __setitem__(self, key: Tensor, value: Any) -> None:
        next(states for states in self._states if key in states)[key] = value

    @override
    def __delitem__(self, key: Tensor) -> None:
        del next(states for states in self._states if key in states)[key]

    @override
    def __iter__(self) -> Iterator[Tensor]:
        return (key for states in self._states for key in states if isinstance(key, Tensor))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


def take_loss(
    optimizer: Optimizer, name: object, loss: object, weight: Weight, loader: str, loaders: Any
) -> None:
    """Keep a loss until the step has returned; see `Run.optimize`. `loaders` are those of it."""
    if not isinstance(optimizer, Optimizers):
        raise ConfigError(
            "`run.optimize` gives a loss to one of several optimizers, but this training has one. "
            "Return the loss from `training_step`, or name several: "
            '`fit(..., optimizer={"a": ..., "b": ...})`.'
        )
    if loader and loader not in (loaders or ()):
        are = f"the training loaders are {quoted([*loaders])}" if loaders else "there is one"
        raise ConfigError(
            f"`run.optimize` was given the loader {loader!r}, but {are}. Of several, pass the one "
            "whose samples the loss is a mean over, by its name in the batch."
        )
    optimizer.take(name, loss, weight, loader or "")


def loss_given(optimizer: Optimizer, output: object) -> Tensor:
    """Return the loss of a step that has returned `output`; of several the sum."""
    losses = optimizer.losses if isinstance(optimizer, Optimizers) else None
    if not losses:
        return loss_of(output)
    return torch.stack([each.loss for own in losses.values() for each in own.values()]).sum()


def described(optimizer: Optimizer) -> str:
    """Return the class of an optimizer, or names, classes and turns of several."""
    return optimizer.described if isinstance(optimizer, Optimizers) else type(optimizer).__name__


def refuse_several(optimizer: Optimizer, what: str) -> None:
    """Raise where `what`, which works on one optimizer, meets several."""
    if isinstance(optimizer, Optimizers):
        raise ConfigError(
            f"{what} works on one optimizer, but this training has {optimizer.described}. Leave "
            "it out."
        )


def _describe(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return f"a {type(loss).__name__!r}"
    return f"one of the shape {tuple(loss.shape)}{'' if loss.requires_grad else ' without a graph'}"
