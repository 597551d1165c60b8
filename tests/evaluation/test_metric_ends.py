"""Who takes the bad end of a metric for the good one hears so, once."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import LRSchedule
from trainkit.callbacks import Checkpoint, EarlyStopping, Evaluation, OptunaPruning
from trainkit.metrics import FunctionMetric

ACCURACY = "eval/accuracy"
METRICS: Any = ["accuracy"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def _stops(metric: str, mode: Any) -> Any:
    return {"callbacks": [EarlyStopping(metric, patience=9, mode=mode)]}


def _keeps(metric: str, mode: Any) -> Any:
    return {"callbacks": [Checkpoint(keep_best=(metric, mode))]}


def _prunes(metric: str, mode: Any) -> Any:
    direction: Any = f"{mode}imize"
    trial = optuna.create_study(direction=direction).ask()
    return {"callbacks": [OptunaPruning(trial, metric)]}


def _slows(metric: str, mode: Any) -> Any:
    return {"lr_scheduler": lambda o: LRSchedule(ReduceLROnPlateau(o, mode), metric=metric)}


def train(folder: Path, settings: Any, metrics: Any = METRICS) -> None:
    callbacks = [Evaluation(metrics), *settings.pop("callbacks", [])]
    fit(make_trainer(max_epochs=3, callbacks=callbacks, output_dir=folder), **settings)


WATCHERS = {
    "`EarlyStopping` watches": _stops,
    "`Checkpoint` keeps the best by": _keeps,
    "`OptunaPruning` reports": _prunes,
    "`LRSchedule` watches": _slows,
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_the_worst_is_not_taken_for_the_best_without_a_word(
    watcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make: Callable[[str, str], Any] = WATCHERS[watcher]
    for metric, good, bad, better in ((ACCURACY, "max", "min", "higher"),
                                      ("eval/loss", "min", "max", "lower")):  # fmt: skip
        train(tmp_path / f"good-{good}", make(metric, good))
        assert "better" not in capsys.readouterr().out
        train(tmp_path / f"bad-{good}", make(metric, bad))
        said = [line for line in capsys.readouterr().out.splitlines() if "better" in line]
        assert len(said) == 1
        assert said[0].startswith(f"trainkit: {watcher} '{metric}' with \"{bad}")
        assert f"but {better} values of it are better" in said[0]


def picky(predictions: Any, references: Any) -> float:
    if len(references) < 16:  # all that there is to evaluate
        raise ValueError("too few")
    return float((predictions == references).float().mean())


def test_it_is_said_after_the_first_evaluation_where_no_metric_tells_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = [FunctionMetric(picky, higher_is_better=True)]
    train(tmp_path, _stops("eval/picky", "min"), metrics)
    assert capsys.readouterr().out.count("higher values of it are better") == 1
    train(tmp_path, _stops("eval/picky", "min"), [picky])  # nobody knows
    assert "better" not in capsys.readouterr().out


def _together(rank: int, folder: Path) -> None:
    train(folder, _keeps(ACCURACY, "min"))


@pytest.mark.e2e
def test_one_process_of_several_says_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, partial(_together), tmp_path)
    assert capfd.readouterr().out.count("higher values of it are better") == 1
