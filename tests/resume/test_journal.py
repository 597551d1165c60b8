"""The journal of a run: what it says, and that a resume leaves it as if nothing had happened."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, Run, StepResult
from trainkit.basics.run_files import LeftOut
from trainkit.callbacks import Checkpoint, Journal
from trainkit.journal import JOURNAL, cut, read

MOST_BYTES = 100  # a step


class Losses(Callback):
    """Keeps what the steps gave, and skips one window."""

    def __init__(self, skipped: int | None = None) -> None:
        self.seen: list[tuple[float, float | None]] = []
        self.skipped = skipped

    def on_gradients(self, run: Run) -> None:
        if run.state.attempts == self.skipped:
            run.request_skip("the test\nsays so")

    def on_step_end(self, run: Run, result: StepResult) -> None:
        norm = None if result.grad_norm is None else float(result.grad_norm)
        self.seen.append((float(result.loss), norm))

    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self.on_step_end(run, result)


def train(folder: Path, *callbacks: Callback, **settings: Any) -> None:
    resume = settings.pop("resume", None)
    going_on = {} if resume is None else {"resume": resume, "schedule": "keep"}
    given = {"max_epochs": 2, "max_grad_norm": 1.0, "output_dir": folder, **settings}
    fit(make_trainer(callbacks=[*callbacks], **given), **going_on)


def test_a_line_for_each_window_to_the_last_bit(tmp_path: Path) -> None:
    losses = Losses(skipped=3)
    train(tmp_path, losses, Checkpoint())
    journal = read(tmp_path)
    assert [(r.loss, r.grad_norm) for r in journal.records] == [
        (loss, None if number == 3 else norm) for number, (loss, norm) in enumerate(losses.seen)
    ]
    assert [r.attempt for r in journal.records] == [*range(1, 17)]
    assert [(r.epoch, r.first, r.stop) for r in journal.records] == [
        (epoch, first, first + 4) for epoch in range(2) for first in range(0, 32, 4)
    ]
    skipped = [r for r in journal.records if r.skip is not None]
    assert [(r.step, r.skipped, r.skip) for r in skipped] == [(3, 1, "the test says so")]
    found = journal.record_of(4)
    assert found is not None
    assert (found.attempt, journal.record_of(99)) == (5, None)
    assert journal.header["run"]["processes"] == 1
    assert journal.header["run_id"] == journal.header_of(found)["run_id"] != ""
    assert max(len(record.line()) for record in journal.records) < MOST_BYTES


def test_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    class Big(Callback):
        def on_step_start(self, run: Run) -> None:
            if run.state.step == 2:
                next(run.module.parameters()).data.fill_(math.nan)

    train(tmp_path, Big(), Journal(), max_epochs=1)
    journal = read(tmp_path)
    assert [r.is_bad for r in journal.records] == [False] * 2 + [True] * 6
    assert math.isnan(journal.records[2].loss)


def lines(folder: Path) -> list[str]:
    return [record.line() for record in read(folder).records]


@pytest.mark.parametrize("stop", [3, 8, 11])
def test_a_resumed_run_has_the_journal_of_one_that_was_not_stopped(
    tmp_path: Path, stop: int
) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    train(whole, Checkpoint(every_n_steps=4))
    saves = Journal(), Checkpoint(every_n_steps=4, keep_last=None)  # in the other order too
    train(halves, *saves, max_epochs=None, max_steps=stop)
    place = halves / "checkpoints" / f"step-{stop // 4 * 4 or stop:08d}"
    with (halves / JOURNAL).open("a") as file:
        file.write("13 0 1 16 2")  # a process was killed while it wrote
    train(halves, Checkpoint(every_n_steps=4), resume=place)
    assert lines(halves) == lines(whole)
    assert len(read(halves).headers) == 2


def test_a_new_run_leaves_the_journal_of_an_older_one(tmp_path: Path) -> None:
    for steps in (2, 3):
        train(tmp_path, Journal(), max_epochs=None, max_steps=steps)
    assert len(lines(tmp_path)) == 3
    assert (tmp_path / f"{JOURNAL}.1").read_text().count("\n") == 3


def test_a_run_that_goes_on_from_another_folder_leaves_the_journal_there(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    train(other, Checkpoint(every_n_steps=4, keep_last=None))
    train(own, Journal(), max_grad_norm=0.1)
    older = lines(own)
    train(own, Journal(), resume=other / "checkpoints" / "step-00000004")
    assert lines(own) == lines(other)[4:]
    assert (own / f"{JOURNAL}.1").read_text().count("\n") == 1 + len(older)


def test_only_one_is_written_and_a_list_without_any_writes_none(tmp_path: Path) -> None:
    trainer = make_trainer(callbacks=[Journal(), Checkpoint()], output_dir=tmp_path)
    assert [each.name for each in trainer.callbacks.callbacks] == ["Journal", "Checkpoint"]
    train(tmp_path / "none")
    assert not (tmp_path / "none" / JOURNAL).exists()
    with pytest.raises(ConfigError, match="holds no journal"):
        read(tmp_path / "none")


def test_what_is_no_journal_is_refused_and_a_line_that_is_none_left_out(tmp_path: Path) -> None:
    train(tmp_path / "real", Journal())
    header, *windows = (tmp_path / "real" / JOURNAL).read_text().splitlines()
    (tmp_path / JOURNAL).write_text(f"1 2 3\n{windows[0]}\n")
    with (
        pytest.warns(LeftOut, match=r"line 1 was left out \(no window\)"),
        pytest.raises(ConfigError, match="does not say how the run was started"),
    ):
        read(tmp_path)
    other = header.replace('"folder"', '"place"')
    (tmp_path / JOURNAL).write_text("\n".join([header, windows[0], "1 2", other, *windows[1:], ""]))
    with pytest.warns(LeftOut, match=r"line 3 was left out \(no window\), and 1 more"):
        journal = read(tmp_path)
    assert [record.line() for record in journal.records] == windows
    assert len(journal.headers) == 1
    cut(tmp_path / JOURNAL, 0)
    assert (tmp_path / JOURNAL).read_text() == ""


def on_rank(rank: int, folder: Path) -> list[str]:
    train(folder, Checkpoint())
    return lines(folder)


def test_two_processes_write_one(tmp_path: Path) -> None:
    one, other = run_ranks(2, on_rank, tmp_path)
    assert one == other
    assert len(one) == 8  # the windows are twice as large
    assert read(tmp_path).records[1].first == 8
