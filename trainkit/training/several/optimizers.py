"""Several optimizers of one training, each under a name; together they look like one."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.errors import ConfigError


class Optimizers(Optimizer):
    """Several optimizers as one, for all that saves, compares and watches an optimizer.

    The groups are those of the optimizers one after the other, the same objects; the state of each
    parameter lies with its optimizer.

    Args:
        parts: By name, in the order in which they are updated.
        windows: How many windows in a row each one gets, where they take turns.
    """

    def __init__(
        self, parts: Mapping[str, Optimizer], windows: Mapping[str, int] | None = None
    ) -> None:
        self.parts, self._windows = dict(parts), windows or {}
        for name, optimizer in self.parts.items():
            groups = optimizer.param_groups
            for number, group in enumerate(groups):  # by which learning rates are logged
                group.setdefault("name", name if len(groups) == 1 else f"{name}/{number}")
        for switch in ("train", "eval"):  # as schedule-free ones have
            own = [getattr(part, switch) for part in parts.values() if hasattr(part, switch)]
            if own:
                setattr(self, switch, lambda own=own: [call() for call in own])

    @property
    def described(self) -> str:
        """Names and classes, and the turns."""
        classes = ", ".join(f"{name}: {type(part).__name__}" for name, part in self.parts.items())
        turns = ", ".join(f"{count} x {name}" for name, count in self._windows.items())
        return f"{classes}; in turns of {turns}" if turns else classes

    # What an optimizer has.

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, one after the other."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    @override
    def state(self) -> Any:  # type: ignore[override]
        """The states of all parameters."""
        return _States(self.parts.values())

    @property
    @override
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings of each, by its name."""
        return {name: part.defaults for name, part in self.parts.items()}

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts.values():
            part.step()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts.values():
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
        for name, part in self.parts.items():
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
        for name, part in self.parts.items():
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
