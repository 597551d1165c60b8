"""Tests of saying where the time went."""

import re
import time
from pathlib import Path

import pytest

from tests.helpers.callbacks import FailsAt
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, Run, StepResult
from trainkit.basics.formatting import duration
from trainkit.callbacks import Checkpoint, Timer
from trainkit.callbacks.timer import _times


class _Slow(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        time.sleep(0.01)

    def on_evaluation_batch_end(self, run: Run) -> None:
        time.sleep(0.02)

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        time.sleep(0.03)


def test_it_tells_the_parts_of_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timer = Timer()
    start = time.monotonic()
    fit(make_trainer(max_epochs=2, callbacks=[timer, _Slow(), Checkpoint()], output_dir=tmp_path))
    wall = time.monotonic() - start
    assert set(timer.seconds) == {"setup", "train", "evaluate", "save", "end"}
    assert sum(timer.seconds.values()) <= wall
    assert timer.seconds["train"] >= 2 * 8 * 0.01
    assert timer.seconds["evaluate"] >= 2 * 4 * 0.02
    assert timer.seconds["save"] >= 2 * 0.03
    assert len(timer.epochs) == len(timer.evaluations) == timer.checkpoints == 2
    assert min(timer.epochs) >= 8 * 0.01
    assert min(timer.evaluations) >= 4 * 0.02
    lines = capsys.readouterr().out.splitlines()
    second = r"\d+\.\d+ s"
    for line, pattern in zip(
        lines,
        [
            rf"trainkit: time of the fit {second}",
            rf"  set-up +{second} +\d+\.\d%",
            rf"  training +{second} +\d+\.\d%  2 epochs: {second}, {second}",
            rf"  evaluation +{second} +\d+\.\d%  2 evaluations: {second}, {second}",
            rf"  saving +{second} +\d+\.\d%  2 checkpoints",
            rf"  closing +{second} +\d+\.\d%",
        ],
        strict=True,
    ):
        assert re.fullmatch(pattern, line), line


def test_a_second_fit_counts_anew_and_a_failed_one_is_told_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    timer = Timer()
    fit(make_trainer(callbacks=[timer]))
    with pytest.raises(ValueError, match="enough"):
        fit(make_trainer(callbacks=[timer, _Slow(), FailsAt(3)]))
    assert timer.epochs == timer.evaluations == []
    out = capsys.readouterr().out
    assert out.count("trainkit: time of the fit") == 2
    assert "epoch" not in out.split("trainkit:")[-1]


def test_times_are_written_for_people() -> None:
    times = {0.04: "0.04 s", 99.94: "1 min 39 s", 3725.0: "1 h 2 min", 90_000.0: "1 d 1 h"}
    assert {seconds: duration(seconds) for seconds in times} == times
    assert _times("epoch", [1.0]) == "1 epoch: 1.0 s"
    assert _times("epoch", [1.0] * 9 + [11.0]) == "10 epochs: mean 2.0 s, longest 11 s"
