"""Tests of stopping when a figure no longer improves."""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.helpers.callbacks import StopsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import Scripted, fit, make_trainer, toy_loaders
from trainkit import Callback, ConfigError, Trainer
from trainkit.callbacks import Checkpoint, EarlyStopping, Evaluation
from trainkit.checkpoint.forms import Unfit


def accuracy(predictions: Any, references: Any) -> float:
    if len(references) < 16:  # so its name is not known ahead
        raise ValueError("too few")
    return float((predictions == references).float().mean())


def _epochs(values: list[float], stopping: EarlyStopping) -> int:
    trainer = Scripted(max_epochs=len(values), callbacks=[stopping])
    trainer.values = values
    return fit(trainer).epoch


@pytest.mark.parametrize(
    ("mode", "values", "epochs"),
    [
        ("min", [3.0, 2.0, 2.0, 2.5, 1.0], 4),
        ("max", [1.0, 2.0, 1.5, 2.0, 3.0], 4),
        ("max", [1.0, 2.0, 1.5, 3.0, 4.0], 5),
        ("min", [2.0, math.nan, math.nan, 1.0], 3),
        ("min", [math.nan, 1.0, 2.0, 0.5], 4),
    ],
)
def test_it_stops_after_patience_evaluations_without_a_new_best(
    mode: Any, values: list[float], epochs: int
) -> None:
    assert _epochs(values, EarlyStopping("eval/mine", patience=2, mode=mode)) == epochs


def test_less_than_min_delta_is_no_improvement() -> None:
    stopping = EarlyStopping("eval/mine", patience=2, mode="min", min_delta=0.5)
    assert _epochs([3.0, 2.8, 2.6, 1.0], stopping) == 3


def test_the_reason_names_metric_and_patience() -> None:
    stopping = EarlyStopping("eval/accuracy", patience=1, mode="max", min_delta=2.0)
    trainer = make_trainer(max_epochs=9, callbacks=[stopping, Evaluation(["accuracy"])])
    result = fit(trainer)
    assert result.epoch == 2
    assert result.stop_reason == "eval/accuracy has not improved for 1 evaluations"


def test_a_run_that_it_has_stopped_trains_no_further(tmp_path: Path) -> None:
    results = []
    for resume in (None, "must"):
        stopping = EarlyStopping("eval/loss", patience=1, mode="min", min_delta=100.0)
        trainer = make_trainer(
            max_epochs=9, callbacks=[stopping, Checkpoint()], output_dir=tmp_path
        )
        result = fit(trainer, resume=resume)
        results.append((result.epoch, result.step, result.stop_reason))
    assert results[0] == results[1]
    assert results[0][0] == 2


@pytest.mark.parametrize("at", [1, 3])
def test_the_evaluation_of_a_stop_counts_for_nothing(tmp_path: Path, at: int) -> None:
    class Figures(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
            assert self.run is not None
            # What is evaluated between epochs would be the best, or one failure more.
            inside = {1: 0.0, 3: 9.0}[at] if self.run.state.epoch_samples else 2.0
            return {"mine": inside}

    def epochs(*callbacks: Callback, **arguments: Any) -> list[Any]:
        stopping = EarlyStopping("eval/mine", patience=5, mode="min")
        trainer = Figures(
            max_epochs=9, callbacks=[stopping, Checkpoint(), *callbacks], output_dir=tmp_path
        )
        return [fit(trainer, **arguments).epoch, stopping.state_dict()]

    whole = epochs()
    shutil.rmtree(tmp_path)
    epochs(StopsAt(8 * at + 3))
    assert epochs(resume="must") == whole


def test_an_unknown_metric_is_an_error_before_the_first_step_that_lists_the_known() -> None:
    stopping = EarlyStopping("eval/acuracy", patience=1, mode="max")
    trainer = make_trainer(callbacks=[stopping, Evaluation(["accuracy"])])
    nearest_first = r"only \['eval/accuracy', 'eval/loss'\]"
    with pytest.raises(ConfigError, match=nearest_first):
        fit(trainer)
    assert trainer.run is not None
    assert trainer.run.state.step == 0


def test_so_is_one_that_an_evaluation_step_of_the_user_does_not_give() -> None:
    stopping = EarlyStopping("eval/yours", patience=1, mode="min")
    trainer = Scripted(max_epochs=2, callbacks=[stopping])
    trainer.values = [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"only \['eval/mine'\]"):
        fit(trainer)
    assert trainer.run is not None
    assert trainer.run.state.step == 0


def test_where_names_are_not_known_ahead_the_first_evaluation_decides() -> None:
    stopping = EarlyStopping("eval/acuracy", patience=1, mode="max")
    trainer = make_trainer(callbacks=[stopping, Evaluation([accuracy])])
    with pytest.raises(ConfigError, match=r"only \['eval/accuracy', 'eval/loss'\]"):
        fit(trainer)
    assert trainer.run is not None
    assert trainer.run.state.step == 8


def test_without_an_evaluation_loader_it_is_refused() -> None:
    stopping = EarlyStopping("eval/loss", patience=1, mode="min")
    with pytest.raises(ConfigError, match="no evaluation loader"):
        fit(make_trainer(callbacks=[stopping]), toy_loaders()[0])


@pytest.mark.parametrize(
    "arguments", [{"patience": 0}, {"mode": "auto"}, {"min_delta": -1.0}, {"min_delta": math.nan}]
)
def test_bad_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(arguments))}` must be"):
        EarlyStopping("eval/loss", **{"patience": 1, "mode": "min", **arguments})


def test_a_mode_that_is_none_is_told_what_the_modes_mean() -> None:
    wanted = r'`mode` must be "min" \(lower is better\) or "max" \(higher is better\), but is'
    with pytest.raises(ConfigError, match=wanted):
        EarlyStopping("eval/loss", patience=1, mode="lower")  # type: ignore[arg-type]


def test_a_state_with_other_keys_is_refused() -> None:
    run: Any = None
    with pytest.raises(Unfit, match="lacks the key 'bad_evaluations'"):
        EarlyStopping("eval/loss", patience=1, mode="min").check_state_dict(run, {"best": 1.0})


def _stop(rank: int) -> tuple[int, str]:
    stopping = EarlyStopping("eval/loss", patience=1, mode="min", min_delta=100.0)
    trainer = make_trainer(max_epochs=9, callbacks=[stopping])
    result = fit(trainer)
    trainer.close()
    return result.step, result.stop_reason


def test_two_processes_stop_at_the_same_step() -> None:
    first, second = run_ranks(2, _stop)
    assert first == second == (8, "eval/loss has not improved for 1 evaluations")
