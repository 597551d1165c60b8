"""Tests of the progress bar: in a log file, in a real terminal, and what it costs."""

import math
import os
import pty
import re
import select
import sys
import termios
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from tests.helpers.callbacks import FailsAt, Skips
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Callback, Run, StepResult
from trainkit.callbacks import Evaluation, ProgressBar, progress_bar


def _in_terminal(
    monkeypatch: pytest.MonkeyPatch,
    *callbacks: Callback,
    size: tuple[int, int] = (24, 120),
    streams: tuple[str, ...] = ("stdout", "stderr"),
    around: bool = False,
    **settings: Any,
) -> str:
    """Return everything that a training writes to a terminal of so many rows and columns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    terminal = os.fdopen(theirs, "w")
    for name in streams:
        monkeypatch.setattr(sys, name, terminal)
    error: BaseException | None = None
    try:
        with tqdm(total=1, desc="seeds", file=terminal) if around else nullcontext():
            fit(make_trainer(callbacks=[ProgressBar(), *callbacks], **settings))
    except ValueError as raised:
        error = raised
    finally:
        assert all(getattr(sys, name) is terminal for name in streams)
        monkeypatch.undo()
    terminal.flush()
    text = b""
    while select.select([ours], [], [], 0.2)[0]:
        text += os.read(ours, 65536)
    terminal.close()
    os.close(ours)
    assert (error is not None) == any(isinstance(callback, FailsAt) for callback in callbacks)
    return text.decode()


def _screen(text: str) -> list[str]:
    """Return the lines that a terminal shows after all of this was written to it."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\r\n]|[^\r\n\x1b]+", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.startswith("\x1b"):
            assert part == "\x1b[A", part
            row -= 1
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


ROW = r"epoch {}/{}  step {}  \d\d:\d\d  train loss \d\S+ *  eval loss \d\S+ *  accuracy \d\S*"


def test_a_terminal_gets_one_bar_that_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _in_terminal(monkeypatch, Evaluation(["accuracy"]), max_epochs=2)
    last = text.removesuffix("\r\n").rsplit("\r", 1)[-1]
    assert re.match(r"epoch 2/2: 100%\|.+\| 16/16 \[00:0\d<00:00, loss 0\.\d+, lr 0\.1", last)
    assert "evaluating 0/4" in text
    assert text.endswith("\r\n")
    rows = _screen(text)
    assert [
        bool(re.fullmatch(ROW.format(*part), rows[i]))
        for i, part in enumerate([(1, 2, " 8"), (2, 2, "16")])
    ] == [True, True], rows
    assert len(rows) == 4
    assert rows[2].startswith("epoch 2/2: 100%")
    assert rows[3] == ""


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
    assert "evaluating" not in text.split("eval loss")[1]


def test_the_bar_is_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _in_terminal(monkeypatch, FailsAt(5))
    assert "| 5/8 [" in text.rsplit("\r", 2)[-2]
    assert text.endswith("\r\n")


def test_skipped_steps_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1 skipped" in _in_terminal(monkeypatch, Skips(2))


class _Prints(Callback):
    """Prints in many ways, as users do."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        step = run.state.step
        print("step", step, "of", run.planned_steps)
        if step == 3:
            print("a line that ", end="")
            print("comes in parts")
            print("two\nlines")
        if step == 5:
            print("no end", end="", flush=True)
        if step == 6:
            print()
            sys.stdout.write("by hand\n")


def test_what_is_printed_stands_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _screen(_in_terminal(monkeypatch, _Prints(), size=(24, 80)))
    expected = [f"step {step} of 8" for step in range(1, 9)]
    expected[3:3] = ["a line that comes in parts", "two", "lines"]
    assert (
        rows[: expected.index("step 5 of 8") + 1] == expected[: expected.index("step 5 of 8") + 1]
    )
    rest = rows[expected.index("step 5 of 8") + 1 :]
    assert [row for row in rest if row and not row.startswith("epoch")] == [
        "no end",
        "step 6 of 8",
        "by hand",
        "step 7 of 8",
        "step 8 of 8",
    ] or rest[0].startswith("no end")
    assert sum("%|" in row for row in rows) <= 2
    assert all(len(row) < 80 for row in rows)
    assert "8/8 [" in rows[-2]


class _OwnBar(Callback):
    """Has a bar of its own, and warns."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 4:
            for _ in tqdm(range(3), desc="mine"):
                print("in a bar", file=sys.stderr)
            print("to stderr", file=sys.stderr)


def test_bars_of_others_and_what_goes_to_stderr_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _screen(_in_terminal(monkeypatch, _OwnBar(), size=(24, 80)))
    for text in ("mine: 100%", "to stderr", "epoch 1/1: 100%"):
        assert sum(row.startswith(text) for row in rows) == 1, rows


def test_a_bar_around_the_fit_stays_above_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _in_terminal(monkeypatch, _Prints(), size=(24, 80), around=True)
    rows = _screen(text)
    assert rows[:2] == ["step 1 of 8", "step 2 of 8"]
    ends = [row for row in rows if "%|" in row]
    assert [row.partition(":")[0] for row in ends] == ["epoch 1/1", "seeds"], rows
    assert re.search(r"seeds: +0%.*\r?\n\repoch 1/1: ", text)  # while it trains


def test_where_stdout_is_a_file_both_places_have_the_evaluations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _in_terminal(
        monkeypatch, Evaluation(["accuracy"]), _Prints(), streams=("stderr",), max_epochs=2
    )
    table = [line for line in capsys.readouterr().out.splitlines() if "eval loss" in line]
    assert len(table) == 2
    assert [row for row in _screen(text) if "eval loss" in row] == table


def test_many_metrics_are_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    def many(predictions: Any, references: Any) -> dict[str, float]:
        return {f"metric number {index}": index / 7 for index in range(9)}

    fit(make_trainer(max_epochs=20, callbacks=[ProgressBar(), Evaluation([many])]))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) < 80 for line in lines)
    assert len(lines) == 20 * 4
    assert lines[0].startswith("epoch  1/20  step   8  00:00  train loss 0.")
    assert lines[1].startswith("    metric number ")
    assert all("metric number" not in line.rsplit(maxsplit=1)[0][-6:] for line in lines)


def test_a_log_file_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    fit(make_trainer(max_epochs=2, callbacks=[ProgressBar()]))
    printed = capsys.readouterr()
    assert "\r" not in printed.out + printed.err
    table, lines = printed.out.splitlines(), printed.err.splitlines()
    starts = [line.split("  train loss")[0] for line in table]
    assert starts == ["epoch 1/2  step  8  00:00", "epoch 2/2  step 16  00:00"]
    assert re.match(r"epoch 2/2, step 16/16, 00:00 elapsed, loss 0\.\d+, lr 0\.1", lines[0])
    assert len(lines) == 1


def test_the_last_rate_is_that_of_the_last_update(capsys: pytest.CaptureFixture[str]) -> None:
    fit(make_trainer(max_steps=4, callbacks=[ProgressBar()]), lr_scheduler="linear")
    assert "lr 0.025" in capsys.readouterr().err  # the schedule is at 0 after it


def test_each_named_loader_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluation = toy_loaders()
    loaders = {"train": train, "eval": {"dev": evaluation, "test": evaluation}}
    fit(make_trainer(callbacks=[ProgressBar(), Evaluation(["accuracy"])]), loaders)
    lines = capsys.readouterr().out.splitlines()
    rows = "\n".join(lines).split("epoch ")[1:]
    for name, row in zip(("dev", "test"), rows, strict=True):
        assert re.search(rf"  step 8  .*  eval/{name} loss \S+\s+accuracy \S+$", row.rstrip())


def test_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "FIRST_LINE_SECONDS", 0.0)
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
