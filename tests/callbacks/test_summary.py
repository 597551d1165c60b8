"""Tests of what is printed at the start and at the end."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.callbacks import FailsAt
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import ConfigError
from trainkit.callbacks import Evaluation, JSONLLogger, Summary
from trainkit.callbacks.summary import _block


def test_it_says_what_is_trained_and_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = toy_model()
    next(model.parameters()).requires_grad_(False)
    callbacks = [Summary(), Evaluation(["accuracy"]), JSONLLogger()]
    trainer = make_trainer(
        max_epochs=2, callbacks=callbacks, output_dir=tmp_path, gradient_accumulation_steps=2
    )
    result = fit(trainer, model=model)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:7] == [
        "trainkit: training Sequential",
        "  parameters    58 (26 trainable)",
        f"  strategy      single, 1 process, {next(model.parameters()).device}",
        "  precision     fp32",
        "  window        8 samples (4 x 1 process x 2 micro-batches)",
        "  planned       8 steps, 2 epochs",
        f"  output        {tmp_path}",
    ]
    assert lines[7].endswith("(max_epochs)")
    assert lines[8] == "  steps         8 (2 epochs completed, 64 samples)"
    assert f"eval/accuracy {result.best_metrics['eval/accuracy']:.4g}" in lines[9]
    assert lines[-1] == f"  files         {tmp_path}: metrics.events.jsonl, metrics.jsonl"


def _outcome(capsys: pytest.CaptureFixture[str], *metrics: Any, loaders: Any = None) -> list[str]:
    """Return the lines about figures that a training prints at its end."""
    fit(make_trainer(callbacks=[Summary(), Evaluation(metrics)]), loaders)
    lines = capsys.readouterr().out.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("  steps"))
    return [re.sub(r"\d\.\d+", "#", line) for line in lines[start + 1 :]]


def test_last_figures_that_are_the_best_are_not_said_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _outcome(capsys, "accuracy") == ["  best          eval/loss #, eval/accuracy #"]


def test_a_figure_of_unknown_direction_has_no_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert _outcome(capsys, lambda predictions, references: {"odd": 0.25}) == [
        "  best          eval/loss #",
        "  last          eval/loss #, eval/odd #",
    ]


def test_each_named_loader_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluation = toy_loaders()
    loaders = {"train": train, "eval": {"dev": evaluation, "test": evaluation}}
    assert _outcome(capsys, "accuracy", loaders=loaders) == [
        "  best          eval/dev: loss #, accuracy #",
        "                eval/test: loss #, accuracy #",
    ]


def test_a_training_that_failed_says_by_what(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="enough"):
        fit(make_trainer(callbacks=[Summary(), FailsAt(1)]))
    assert "trainkit: ended by ValueError after 00:00" in capsys.readouterr().out


def test_it_is_silent_where_it_never_began(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="output_dir"):
        fit(make_trainer(callbacks=[JSONLLogger(), Summary()]))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_are_as_long_as_the_terminal_is_wide(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    lines = _block("title", {"data": "word " * 100}).splitlines()
    assert columns - 6 < max(map(len, lines)) < columns
