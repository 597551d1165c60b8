"""Tests of when a run is evaluated."""

from typing import Any

import pytest

from tests.helpers.toys import fit, make_trainer, toy_loaders
from trainkit import Callback, ConfigError, Run
from trainkit.callbacks import Evaluation


class _Steps(Callback):
    """Notes at which steps the run was evaluated."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.seen.append(run.state.step)


def _evaluated(evaluation: Evaluation, **settings: Any) -> list[int]:
    steps = _Steps()
    fit(make_trainer(callbacks=[evaluation, steps], **settings))  # 8 steps an epoch
    return steps.seen


def test_it_is_after_every_epoch_unless_told_otherwise() -> None:
    assert _evaluated(Evaluation(), max_epochs=3) == [8, 16, 24]


def test_steps_epochs_and_the_end_that_coincide_give_one_evaluation() -> None:
    evaluation = Evaluation(every_n_steps=4, every_n_epochs=1)
    assert _evaluated(evaluation, max_epochs=2) == [4, 8, 12, 16]


def test_the_last_step_is_evaluated_in_any_case() -> None:
    assert _evaluated(Evaluation(every_n_steps=3), max_steps=7) == [3, 6, 7]
    assert _evaluated(Evaluation(every_n_steps=3, at_end=False), max_steps=7) == [3, 6]


def test_two_with_different_metrics_add_up() -> None:
    second = Evaluation([lambda predictions, references: {"one": 1.0}])
    second.name = "second"
    result = fit(make_trainer(callbacks=[Evaluation(["accuracy"]), second]))
    assert set(result.metrics) == {"eval/loss", "eval/accuracy", "eval/one"}


def test_named_loaders_stand_in_the_names() -> None:
    train, evaluation = toy_loaders()
    loaders = {"train": train, "eval": {"a": evaluation, "b": evaluation}}
    result = fit(make_trainer(callbacks=[Evaluation(["accuracy"])]), loaders)
    assert result.metrics["eval/a/accuracy"] == result.metrics["eval/b/accuracy"]


def test_without_a_loader_the_error_says_how_to_pass_one() -> None:
    with pytest.raises(ConfigError, match=r"no evaluation loader\. Call `fit\(model, \(train"):
        fit(make_trainer(callbacks=[Evaluation()]), toy_loaders()[0])


def test_one_figure_given_twice_is_an_error_before_the_first_step() -> None:
    with pytest.raises(ConfigError, match="a value called `accuracy`"):
        fit(make_trainer(callbacks=[Evaluation(["accuracy", "accuracy"])]))


@pytest.mark.parametrize(
    "arguments", [{"every_n_steps": 0}, {"every_n_epochs": 1.5}, {"metrics": "accuracy"}]
)
def test_bad_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(arguments))}` must be"):
        Evaluation(**arguments)
