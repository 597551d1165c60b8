"""Tests of the progress bar: in a log file, in a real terminal, and what it costs."""

import math
import os
import pty
import re
import select
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Callback, Run, StepResult
from trainkit.callbacks import Evaluation, ProgressBar
from trainkit.callbacks._support import progress_display


class _Fails(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 5:
            raise ValueError("enough")


class _Skips(Callback):
    def on_gradients(self, run: Run) -> None:
        if run.state.attempts == 2:
            run.request_skip("a wish")


def _in_terminal(
    monkeypatch: pytest.MonkeyPatch,
    *callbacks: Callback,
    size: tuple[int, int] = (24, 120),
    **settings: Any,
) -> str:
    """Return everything that a training writes to a terminal of so many rows and columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    terminal = os.fdopen(theirs, "w")
    monkeypatch.setattr(sys, "stderr", terminal)
    error: BaseException | None = None
    try:
        fit(make_trainer(callbacks=[ProgressBar(), *callbacks], **settings))
    except ValueError as raised:
        error = raised
    finally:
        monkeypatch.undo()
    terminal.flush()
    text = b""
    while select.select([ours], [], [], 0.2)[0]:
        text += os.read(ours, 65536)
    terminal.close()
    os.close(ours)
    assert (error is not None) == any(isinstance(callback, _Fails) for callback in callbacks)
    return text.decode()


def test_a_terminal_gets_one_bar_that_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _in_terminal(monkeypatch, Evaluation(["accuracy"]), max_epochs=2)
    last = text.removesuffix("\r\n").rsplit("\r", 1)[-1]
    assert re.match(r"epoch 2/2: 100%\|.+\| 16/16 \[00:00<00:00, loss 0\.\d+, lr 0\.1", last)
    assert "evaluating 0/4" in text
    assert "step 8: eval/loss" in text
    assert text.endswith("\r\n")


@pytest.mark.parametrize("size", [(0, 0), (0, 80), (24, 0)])
def test_a_terminal_that_claims_to_have_no_size_gets_a_bar(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "| 8/8 [" in _in_terminal(monkeypatch, size=size)


@pytest.mark.parametrize(("columns", "has_loss"), [(62, True), (50, False)])
def test_a_narrow_terminal_leaves_out_the_last_figures(
    columns: int, has_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = re.split(r"[\r\n]+", _in_terminal(monkeypatch, size=(24, columns)))
    bars = [line for line in lines if " 8/8 [" in line]
    assert all(re.fullmatch(r"epoch 1/1: 100%\|.{10,}\| 8/8 \[.*\]", bar) for bar in bars)
    assert all(len(bar) < columns and "lr" not in bar for bar in bars)
    assert ("loss 0." in bars[-1]) == has_loss


def test_the_bar_below_the_figures_of_an_evaluation_is_that_of_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = _in_terminal(monkeypatch, size=(24, 200))
    assert "evaluating" in text
    assert "evaluating" not in text.split("step 8: eval/loss")[1]


def test_the_bar_is_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _in_terminal(monkeypatch, _Fails())
    assert "| 5/8 [" in text.rsplit("\r", 2)[-2]
    assert text.endswith("\r\n")


def test_skipped_steps_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 skipped" in _in_terminal(monkeypatch, _Skips())


def test_a_log_file_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    fit(make_trainer(max_epochs=2, callbacks=[ProgressBar()]))
    text = capsys.readouterr().err
    assert "\r" not in text
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["step 8", "step 16"]
    assert re.match(r"epoch 2/2, step 16/16, 00:00 elapsed, loss 0\.\d+, lr 0\.1", lines[2])
    assert len(lines) == 3


def test_each_named_loader_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluation = toy_loaders()
    loaders = {"train": train, "eval": {"dev": evaluation, "test": evaluation}}
    fit(make_trainer(callbacks=[ProgressBar(), Evaluation(["accuracy"])]), loaders)
    lines = capsys.readouterr().err.splitlines()
    for name, line in zip(("dev", "test"), lines, strict=False):
        assert re.fullmatch(rf"step 8: eval/{name}: loss \S+, accuracy \S+", line)


def test_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_display, "FIRST_LINE_SECONDS", 0.0)
    fit(make_trainer(callbacks=[ProgressBar()]), toy_loaders()[0])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[1] for line in lines] == ["step 1/8", "step 8/8"]


def test_nan_is_shown_as_nan(capsys: pytest.CaptureFixture[str]) -> None:
    model = toy_model()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    fit(make_trainer(callbacks=[ProgressBar()]), toy_loaders()[0], model=model)
    assert "loss nan" in capsys.readouterr().err


def _calls(folder: Path, callbacks: list[Callback], steps: int = 300) -> int:
    """Return how many Python and C functions a training calls."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    trainer = make_trainer(max_steps=steps, callbacks=callbacks, output_dir=folder)
    loader = toy_loaders(4 * steps)[0]
    sys.setprofile(profile)
    try:
        fit(trainer, loader)
    finally:
        sys.setprofile(None)
    return count


def test_it_adds_less_than_15_calls_a_step(tmp_path: Path) -> None:
    _calls(tmp_path, [ProgressBar()], steps=2)  # imports
    plain, shown = _calls(tmp_path, []), _calls(tmp_path, [ProgressBar()])
    assert (shown - plain) / 300 < 15
