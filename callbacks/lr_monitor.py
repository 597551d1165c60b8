"""Log the learning rate."""

from typing import Any

from torch import Tensor
from typing_extensions import override

from trainkit.callbacks._support.log_schedule import log_is_next
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["LRMonitor"]


class LRMonitor(Callback):
    """Logs the learning rate that a log step was made with.

    It is called `lr`; with several parameter groups `lr/<name>`, where a group without an entry
    `name` of its own is called by its number.
    """

    def __init__(self) -> None:
        self._rates: dict[str, Tensor | float] = {}

    @override
    def on_step_start(self, run: Run) -> None:
        if log_is_next(run):  # by the end of the step the scheduler has moved on
            self._rates = _rates(run.optimizer.param_groups)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._rates:
            run.log(self._rates, reduce="last")
            self._rates = {}


def _rates(groups: list[dict[str, Any]]) -> dict[str, Tensor | float]:
    rates = [_copy(group["lr"]) for group in groups]
    if len(rates) == 1:
        return {"lr": rates[0]}
    names = [str(group.get("name", number)) for number, group in enumerate(groups)]
    if len(set(names)) < len(names):
        names = [str(number) for number in range(len(groups))]
    return {f"lr/{name}": rate for name, rate in zip(names, rates, strict=True)}


def _copy(rate: Tensor | float) -> Tensor | float:
    # Schedulers change a tensor in place.
    return rate.detach().clone() if isinstance(rate, Tensor) else rate
