"""Log the learning rate."""

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
            groups = run.optimizer.param_groups
            names = [str(group.get("name", number)) for number, group in enumerate(groups)]
            if len(set(names)) < len(names):
                names = [str(number) for number in range(len(groups))]
            labels = ["lr"] if len(groups) == 1 else [f"lr/{name}" for name in names]
            rates = [group["lr"] for group in groups]
            # Schedulers change a tensor in place.
            copies = [r.detach().clone() if isinstance(r, Tensor) else r for r in rates]
            self._rates = dict(zip(labels, copies, strict=True))

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._rates:
            run.log(self._rates, reduce="last")
            self._rates = {}
