"""Callbacks that keep some of their attributes in checkpoints."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from trainkit.checkpoint.format.value_checks import Check, flag, maybe, number, record, text, whole
from trainkit.training.callback import Callback
from trainkit.training.run import Run

__all__ = ["Keeps"]

_CHECKS: dict[Any, Check] = {
    bool: flag,
    float: number,
    int: whole,
    str: text,
    int | None: maybe(whole),
    str | None: maybe(text),
}


class Keeps(Callback):
    """Has as its state attributes of plain values, by their names without the underscore."""

    _kept: ClassVar[Mapping[str, Any]]
    """The attributes, and their types, such as `int` (from 0 on) or `str | None`."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): getattr(self, name) for name in self._kept}

    @override
    def check_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        checks = {name.lstrip("_"): _CHECKS[kind] for name, kind in self._kept.items()}
        record(checks, closed=True)(state)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._kept:
            setattr(self, name, state[name.lstrip("_")])
