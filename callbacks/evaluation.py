"""Evaluate every so often while training."""

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.callbacks._support.formatting import every
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.training.setup.arguments import make_metrics
from trainkit.types import StepResult

__all__ = ["Evaluation"]


class Evaluation(Callback):
    """Decides when a run is evaluated, and by which metrics.

    With neither `every_n_steps` nor `every_n_epochs` it is after every epoch; with both, at each
    of them. Triggers that coincide give one evaluation (rule 5).

    Args:
        metrics: Names, functions `(predictions, references) -> float | dict`, metrics of
            `evaluate` or of torchmetrics. The mean loss is always there, if there is one.
        every_n_steps: Updates between two evaluations, counted from the start of the run.
        every_n_epochs: Epochs between two evaluations.
        at_end: Whether the last step is evaluated in any case.
    """

    schedules_evaluation = True

    alike = ("every_n_steps", "every_n_epochs", "at_end")

    @checked
    def __init__(
        self,
        metrics: Iterable[Any] = (),
        *,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        at_end: bool = True,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None:
                check_whole(name, value)
        if every_n_steps is None and every_n_epochs is None:
            every_n_epochs = 1
        self.metrics = make_metrics(metrics)
        self.every_n_steps = every_n_steps
        self.every_n_epochs = every_n_epochs
        self.at_end = at_end

    @override
    def explain(self) -> str:
        steps, epochs = self.every_n_steps, self.every_n_epochs
        times = [
            *([every(steps, "step")] if steps else []),
            *([every(epochs, "epoch")] if epochs else []),
            *(["at the last step"] if self.at_end else []),
        ]
        metrics = ", ".join(metric.name for metric in self.metrics)
        return f"Evaluates {' and '.join(times)}: mean loss{', ' if metrics else ''}{metrics}."

    @override
    def on_fit_start(self, run: Run) -> None:
        if not run.evaluation.loaders:
            raise ConfigError(
                "`Evaluation` has nothing to evaluate on: `fit` was given no evaluation loader. "
                'Call `fit(model, (train, eval), ...)` or `fit(model, {"train": ..., "eval": '
                "...}, ...)`."
            )
        known = {key for metric in run.evaluation.metrics for key in metric.keys or ()}
        for metric in self.metrics:
            twice = sorted(known.intersection(metric.keys or ()))
            if twice:
                raise ConfigError(
                    f"Two metrics of this run give a value called `{twice[0]}`. Leave one out."
                )
            known.update(metric.keys or ())
            run.evaluation.metrics.append(metric)
        run.evaluation.at_end |= self.at_end

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self.every_n_steps is not None and run.state.step % self.every_n_steps == 0:
            run.request_evaluation(agreed=True)

    @override
    def on_epoch_end(self, run: Run) -> None:
        if self.every_n_epochs is not None and run.state.epoch % self.every_n_epochs == 0:
            run.request_evaluation(agreed=True)
