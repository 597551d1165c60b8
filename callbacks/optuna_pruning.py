"""Let Optuna end trials that look hopeless."""

from typing import Any, ClassVar

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.callbacks._support.kept import Keeps
from trainkit.distributed import run_on_main
from trainkit.errors import ConfigError
from trainkit.training.run import Run
from trainkit.types import Scalars

__all__ = ["OptunaPruning"]


class OptunaPruning(Keeps):
    """Ends a trial of Optuna that its pruner gives up: `fit` then raises `optuna.TrialPruned`.

    Each evaluation reports `metric`; they are numbered from 0, so that trials with other batch
    sizes can be compared. All processes stop after the same one, save and log as at any end, and
    raise. An evaluation that comes only because the run stops counts for nothing.

    Args:
        trial: The trial on the main process, None on the others.
        metric: A metric of the evaluation, such as "eval/loss"; its good end is the study's.
    """

    _kept: ClassVar = {"_evaluations": int}

    alike = ("metric",)

    @checked
    def __init__(self, trial: Any, metric: str) -> None:
        if trial is not None and not hasattr(trial, "should_prune"):
            raise ConfigError(f"`trial` must be a trial of Optuna or None, but is {trial!r}.")
        self.trial = trial
        self.metric = metric
        self._evaluations = 0
        self._pruned = ""

    @override
    def on_fit_start(self, run: Run) -> None:
        if (self.trial is not None) != run.is_main_process:
            raise ConfigError(
                f"`OptunaPruning` was given {self.trial!r} on process "
                f"{run.processes.process_index}, but the processes of a job train one trial "
                "together, which process 0 has. Ask the study there, and pass None on the others."
            )
        goals = getattr(getattr(self.trial, "study", None), "directions", ())
        mode = goals[0].name.lower() if goals else None
        run.evaluation.watch("`OptunaPruning` reports", self.metric, mode)
        self._pruned = ""
        if run.state.attempts == 0:  # else the state was loaded before
            self._evaluations = 0

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        if not run.evaluation.is_planned:
            return
        value, number = metrics[self.metric], self._evaluations
        self._evaluations += 1

        def is_hopeless() -> bool:
            self.trial.report(value, number)
            return bool(self.trial.should_prune())

        if run_on_main(run.strategy.processes, is_hopeless):
            self._pruned = f"pruned at evaluation {number}: {self.metric} is {value:.6g}"
            run.request_stop(self._pruned, agreed=True)

    @override
    def on_fit_end(self, run: Run) -> None:
        if self._pruned and not run.requests.signal:  # which ends the program, not the trial
            from optuna import TrialPruned  # only who has a trial has it

            raise TrialPruned(self._pruned)
