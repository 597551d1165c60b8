"""Trials of Optuna end when their pruner gives them up, on all processes alike."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.pruners import ThresholdPruner
from optuna.trial import TrialState

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import Scripted, fit, make_trainer, toy_loaders
from trainkit import Callback, ConfigError, Interrupted, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger, OptunaPruning


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def _study(upper: float = 5.0) -> optuna.Study:
    return optuna.create_study(pruner=ThresholdPruner(upper=upper))


def _train(trial: Any, values: list[float], *more: Callback, **settings: Any) -> Trainer:
    callbacks = [OptunaPruning(trial, "eval/mine"), *more]
    trainer = Scripted(max_epochs=len(values), callbacks=callbacks, **settings)
    trainer.values = values
    return trainer


def test_a_study_prunes_the_trials_that_its_pruner_gives_up(tmp_path: Path) -> None:
    study = _study()
    scripts = [[1.0, 2.0, 3.0], [1.0, 9.0, 3.0], [3.0, 2.0, 1.0]]

    def objective(trial: optuna.Trial) -> float:
        more = [Checkpoint(), JSONLLogger()]
        trainer = _train(trial, scripts[trial.number], *more, output_dir=tmp_path, new_run=True)
        return fit(trainer).metrics["eval/mine"]

    study.optimize(objective, n_trials=3)
    complete, pruned = TrialState.COMPLETE, TrialState.PRUNED
    assert [trial.state for trial in study.trials] == [complete, pruned, complete]
    assert [trial.intermediate_values for trial in study.trials] == [
        *[{0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.0, 1: 9.0}, {0: 3.0, 1: 2.0, 2: 1.0}],
    ]
    second = sorted(tmp_path.iterdir())[1]
    last = json.loads((second / "metrics.events.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["error"]) == ("end", 16, None)
    assert last["reason"] == "pruned at evaluation 1: eval/mine is 9"
    assert (second / "checkpoints" / "step-00000016").is_dir()
    assert not (second / "reports").exists()  # it is no failure


def _on_two(rank: int, folder: Path) -> list[Any]:
    found: list[Any] = []
    study = _study() if rank == 0 else None
    for values in ([1.0, 2.0], [9.0, 1.0], [2.0, 1.0]):
        trial = None if study is None else study.ask()
        trainer = _train(trial, values, Checkpoint(), output_dir=folder, new_run=True)
        try:
            found.append(fit(trainer).metrics["eval/mine"])
        except optuna.TrialPruned as error:
            found.append(str(error))
        assert trainer.run is not None
        found.append(trainer.run.state.step)
    return found


@pytest.mark.e2e
def test_all_processes_stop_after_the_same_evaluation_and_go_on_with_the_next_trial(
    tmp_path: Path,
) -> None:
    one, two = run_ranks(2, _on_two, tmp_path)
    assert one == two == [2.0, 8, "pruned at evaluation 0: eval/mine is 9", 4, 1.0, 8]


class Storage:
    """A trial whose data base is gone."""

    def report(self, value: float, step: int) -> None:
        raise ConnectionError("the data base is gone")

    def should_prune(self) -> bool:
        return False


def _with_a_broken_trial(rank: int) -> str:
    trainer = _train(Storage() if rank == 0 else None, [1.0])
    with pytest.raises(Exception, match="the data base is gone") as caught:
        fit(trainer)
    return type(caught.value).__name__


@pytest.mark.e2e
def test_what_fails_on_one_process_fails_on_all() -> None:
    run_ranks(2, _with_a_broken_trial)


def _with_two_trials(rank: int) -> None:
    fit(_train(_study().ask(), [1.0]))


@pytest.mark.e2e
def test_a_job_has_one_trial() -> None:
    with pytest.raises(RanksError, match="train one trial together, which process 0 has"):
        run_ranks(2, _with_two_trials)
    with pytest.raises(ConfigError, match="was given None on process 0"):
        fit(_train(None, [1.0]))


def test_an_unknown_metric_is_an_error_before_the_first_step_that_names_the_nearest() -> None:
    pruning = OptunaPruning(_study().ask(), "eval/acuracy")
    trainer = make_trainer(callbacks=[pruning, Evaluation(["accuracy"])])
    with pytest.raises(ConfigError, match=r"reports 'eval/acuracy'.*\['eval/accuracy', "):
        fit(trainer)
    assert trainer.run is not None
    assert trainer.run.state.step == 0
    with pytest.raises(ConfigError, match="was given no evaluation loader"):
        fit(make_trainer(callbacks=[pruning]), toy_loaders()[0])
    with pytest.raises(ConfigError, match="`trial` must be a trial of Optuna or None"):
        OptunaPruning(_study(), "eval/loss")


class Stops(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.epoch == 1:
            run.request_stop("enough for today", agreed=True)


def test_a_resumed_trial_goes_on_counting(tmp_path: Path) -> None:
    trial = _study().ask()
    fit(_train(trial, [1.0, 2.0, 3.0], Checkpoint(), Stops(), output_dir=tmp_path))
    fit(_train(trial, [1.0, 2.0, 3.0], Checkpoint(), output_dir=tmp_path), resume="must")
    assert trial.study.trials[0].intermediate_values == {0: 1.0, 1: 2.0, 2: 3.0}


class Signals(Callback):
    """Asks for the end while the evaluation that ends the trial is made."""

    def on_evaluation_start(self, run: Run) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_the_sweep_and_not_only_the_trial(tmp_path: Path) -> None:
    trainer = _train(_study().ask(), [9.0, 9.0], Signals(), Checkpoint(), output_dir=tmp_path)
    with pytest.raises(Interrupted):
        fit(trainer)
