"""Stop when a metric no longer improves."""

import math
from typing import ClassVar, Literal

from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.callbacks._support.kept import Keeps
from trainkit.errors import ConfigError
from trainkit.training.run import Run
from trainkit.types import Scalars

__all__ = ["EarlyStopping"]


class EarlyStopping(Keeps):
    """Stops the run after `patience` evaluations in a row without a new best value of `metric`.

    NaN is never better. An evaluation that comes only because the run stops counts for nothing, so
    that a resume goes on as if there had been none. Whether `metric` exists is checked before the
    first step where all names are known by then, else at the first evaluation.

    Args:
        metric: A metric of the evaluation, such as "eval/loss".
        patience: Evaluations without a better value after which to stop, at least 1.
        mode: "min" where lower is better, "max" where higher is.
        min_delta: By how much a better value must differ, in the unit of the metric, at least 0.
    """

    _kept: ClassVar = {"_best": float, "_bad_evaluations": int}

    alike = ("metric", "patience", "mode", "min_delta")

    @checked
    def __init__(
        self, metric: str, *, patience: int, mode: Literal["min", "max"], min_delta: float = 0.0
    ) -> None:
        check_whole("patience", patience)
        if not (math.isfinite(min_delta) and min_delta >= 0):
            raise ConfigError(
                f"`min_delta` must be a finite number of at least 0, but is {min_delta!r}."
            )
        self.metric = metric
        self.patience = patience
        self.mode = mode
        self.min_delta = min_delta
        self._best: float
        self._bad_evaluations: int
        self._reset()

    @override
    def on_fit_start(self, run: Run) -> None:
        run.evaluation.watch("`EarlyStopping` watches", self.metric, self.mode)
        if run.state.attempts == 0:  # else the state was loaded before
            self._reset()
        self._stop_if_due(run)  # where a run is resumed that had ended

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        if not run.evaluation.is_planned:
            return
        value = metrics[self.metric]
        gain = self._best - value if self.mode == "min" else value - self._best
        if gain > self.min_delta:
            self._best, self._bad_evaluations = value, 0
            return
        self._bad_evaluations += 1
        self._stop_if_due(run)

    def _reset(self) -> None:
        self._best = math.inf if self.mode == "min" else -math.inf
        self._bad_evaluations = 0

    def _stop_if_due(self, run: Run) -> None:
        if self._bad_evaluations >= self.patience:
            run.request_stop(
                f"{self.metric} has not improved for {self.patience} evaluations", agreed=True
            )
