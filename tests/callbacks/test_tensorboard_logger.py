"""Tests of the event files, read back by TensorBoard itself."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from tests.callbacks.test_jsonl_logger import _Resumed
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, Run, StepResult
from trainkit.callbacks import TensorBoardLogger


class _Fails(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 5:
            raise ValueError("enough")


def _steps(folder: Path) -> dict[str, list[int]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _run(folder: Path, *before: Callback, **settings: Any) -> dict[str, list[int]]:
    callbacks = [*before, TensorBoardLogger()]
    fit(make_trainer(callbacks=callbacks, output_dir=folder, log_every_n_steps=2, **settings))
    return _steps(folder / "tensorboard")


def test_logs_and_evaluations_are_read_back_with_their_steps(tmp_path: Path) -> None:
    assert _run(tmp_path) == {"train/loss": [2, 4, 6, 8], "eval/loss": [8]}


def test_a_resumed_run_takes_later_events_out_and_keeps_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files of one second are read in the order of a counter, as text: the tenth before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    _run(tmp_path, max_steps=8)
    assert _run(tmp_path, _Resumed(4), max_steps=6)["train/loss"] == [2, 4, 6]


def test_a_new_run_in_the_same_folder_shows_alone(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=8)
    assert _run(tmp_path, max_steps=4)["train/loss"] == [2, 4]


def test_a_failed_run_keeps_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough"):
        _run(tmp_path, _Fails())
    assert _steps(tmp_path / "tensorboard") == {"train/loss": [2, 4]}


def test_a_directory_of_its_own_needs_no_output_dir(tmp_path: Path) -> None:
    fit(make_trainer(callbacks=[TensorBoardLogger(tmp_path / "curves")]))
    assert _steps(tmp_path / "curves")["eval/loss"] == [8]


def test_without_a_place_the_error_names_both_ways() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(output_dir=.*TensorBoardLogger\(directory="):
        fit(make_trainer(callbacks=[TensorBoardLogger()]))


def _two(rank: int, folder: Path) -> None:
    trainer = make_trainer(callbacks=[TensorBoardLogger(folder / str(rank))])
    fit(trainer)
    trainer.close()


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    run_ranks(2, _two, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
