"""Callbacks that keep some of their attributes in checkpoints."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from trainkit.checkpoint.forms import Only, check_form
from trainkit.training.callback import Callback
from trainkit.training.run import Run


class Keeps(Callback):
    """Has as its state attributes of plain values, by their names without the underscore."""

    _kept: ClassVar[Mapping[str, Any]]
    """The attributes, and what each must be: `int` (from 0 on), `float`, `str | None`."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name.lstrip("_"): getattr(self, name) for name in self._kept}

    @override
    def check_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        check_form(state, Only({name.lstrip("_"): form for name, form in self._kept.items()}))

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._kept:
            setattr(self, name, state[name.lstrip("_")])
