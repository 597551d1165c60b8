"""A run that has ended and is started again writes nothing a second time."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer, toy_loaders
from trainkit import Callback, Interrupted, Run
from trainkit.callbacks import Checkpoint, CSVLogger, Evaluation, JSONLLogger


class Skips(Callback):
    """Skips windows, and logs a value wherever it is told to."""

    def __init__(self, windows: set[int], hook: str) -> None:
        self.windows, self.hook = windows, hook
        if hook:
            setattr(self, hook, self._log)

    def on_gradients(self, run: Run) -> None:
        if run.state.attempts + 1 in self.windows:
            run.request_skip("a test")

    def _log(self, run: Run, *arguments: Any) -> None:
        run.log({self.hook: run.state.attempts})


def _start(folder: Path, *callbacks: Callback, evaluates: bool = True, **settings: Any) -> None:
    callbacks = (*callbacks, JSONLLogger(), CSVLogger(), Checkpoint())
    settings = {"log_every_n_steps": 1, **settings}
    trainer = make_trainer(output_dir=folder, callbacks=callbacks, **settings)
    fit(trainer, toy_loaders() if evaluates else toy_loaders()[0], resume="auto")


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "time/seconds"} for x in lines]


def _sessions(folder: Path) -> list[list[str]]:
    """Return the kinds of events, start by start."""
    sessions: list[list[str]] = []
    for line in (folder / "metrics.events.jsonl").read_text().splitlines():
        kind = json.loads(line)["kind"]
        if kind == "start":
            sessions.append([])
        sessions[-1].append(kind)
    return sessions


def _written(folder: Path) -> tuple[Any, ...]:
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return _lines(folder), (folder / "metrics.csv").read_text(), checkpoints


HOOKS = ["", "on_microbatch_end", "on_step_skipped", "on_evaluation_end"]
HOOKS += ["on_checkpoint_start", "on_checkpoint_saved"]


@pytest.mark.parametrize("hook", with_few(["on_microbatch_end"], HOOKS))
@pytest.mark.parametrize(("skipped", "log_every"), [(set[int](), 50), ({8}, 1), ({6, 7, 8}, 50)])
def test_a_finished_run_writes_nothing_again(
    tmp_path: Path, hook: str, skipped: set[int], log_every: int
) -> None:
    for evaluates in (True, False):
        folder = tmp_path / str(evaluates)
        settings: dict[str, Any] = {"log_every_n_steps": log_every, "evaluates": evaluates}
        _start(folder, Skips(skipped, hook), **settings)
        written = _written(folder)
        for _ in range(2):
            _start(folder, Skips(skipped, hook), **settings)
            assert _written(folder) == written
        assert _sessions(folder)[1:] == [["start", "end"]] * 2


def _start_twice(rank: int, folder: Path) -> None:
    for _ in range(2):
        _start(folder, Skips({4}, "on_step_skipped"))


@pytest.mark.e2e
def test_a_finished_run_of_two_processes_writes_nothing_again(tmp_path: Path) -> None:
    run_ranks(2, _start_twice, tmp_path)
    assert _sessions(tmp_path)[1:] == [["start", "end"]]
    assert sum("on_step_skipped" in line for line in _lines(tmp_path)) == 1


class Signals(Callback):
    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


def test_the_evaluation_that_a_signal_left_out_is_made_once(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        _start(tmp_path, Signals(), max_steps=6)
    _start(tmp_path, max_steps=6)
    written = _written(tmp_path)
    assert [line["kind"] for line in written[0][-2:]] == ["train", "eval"]
    _start(tmp_path, max_steps=6)
    assert _written(tmp_path) == written
    assert _sessions(tmp_path)[1:] == [
        ["start", "evaluation", "checkpoint", "end"],
        ["start", "end"],
    ]


def _start_and_die(folder: Path) -> None:
    torch.set_num_threads(1)

    class Kills(Callback):
        def on_checkpoint_saved(self, run: Run, path: Path) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    _start(folder, Skips({8}, "on_evaluation_end"), Kills())


def test_a_run_that_was_killed_after_its_last_save_has_all_its_lines(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_start_and_die, args=(tmp_path / "killed",)
    )
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        _start(folder, Skips({8}, "on_evaluation_end"))
    assert _lines(tmp_path / "killed") == _lines(tmp_path / "whole")


def test_what_is_asked_of_a_finished_run_is_done_once(tmp_path: Path) -> None:
    """An evaluation that is new, as with another loader, is written and saved; then no more."""
    _start(tmp_path, evaluates=False)
    for number in range(3):
        _start(tmp_path, Evaluation(["accuracy"]))
        assert [line["kind"] for line in _lines(tmp_path)].count("eval") == 1, number


def test_a_resume_says_that_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ended in (False, True):
        _start(tmp_path)
        assert ("this run has ended" in capsys.readouterr().out) == ended


class Counts(Callback):
    """Counts steps in what is logged; perhaps ends the run after the first evaluation."""

    def __init__(self, stops: bool) -> None:
        self.stops = stops

    def on_step_end(self, run: Run, result: Any) -> None:
        run.log({"steps": 1}, reduce="sum")

    def on_evaluation_end(self, run: Run, metrics: Any) -> None:
        if self.stops:
            run.request_stop("a test", agreed=True)

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        run.log({"saved": 1}, reduce="sum")


def test_a_run_that_an_evaluation_ends_logs_each_step_once(tmp_path: Path) -> None:
    for stops in (True, False):
        evaluation, saves = Evaluation(every_n_steps=3), Checkpoint(every_n_steps=3)
        callbacks = (Counts(stops), evaluation, saves, JSONLLogger())
        fit(
            make_trainer(output_dir=tmp_path, callbacks=callbacks, log_every_n_steps=50),
            resume="auto",
        )
    lines = _lines(tmp_path)
    assert [line["steps"] for line in lines if "steps" in line] == [3, 5]
    assert sum(line.get("saved", 0) for line in lines) == 3
