"""Tests of the event files, read back by TensorBoard itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from tests.callbacks.test_jsonl_logger import _Resumed
from tests.helpers.callbacks import FailsAt, Skips
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, DataError, Run, StepResult
from trainkit.callbacks import JSONLLogger, Logger, TensorBoardLogger


@pytest.fixture(autouse=True)
def _counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of one second are read in the order of a counter, as text: the tenth before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture(autouse=True)
def _files_are_read_as_they_were_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of one second are read in the order of a counter, as text: the tenth before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def _read(folder: Path) -> EventAccumulator:
    """Return what the pages of TensorBoard are made from."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return events


def _steps(folder: Path) -> dict[str, list[int]]:
    events, curves = _read(folder), {}
    for tag in events.Tags()["tensors"]:
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            curves[tag] = [event.step for event in events.Tensors(tag)]
    return curves


def _run(folder: Path, *before: Callback, **settings: Any) -> dict[str, list[int]]:
    callbacks = [*before, TensorBoardLogger()]
    fit(make_trainer(callbacks=callbacks, output_dir=folder, log_every_n_steps=2, **settings))
    return _steps(folder / "tensorboard")


def test_logs_and_evaluations_are_read_back_with_their_steps(tmp_path: Path) -> None:
    assert _run(tmp_path) == {"train/loss": [2, 4, 6, 8], "eval/loss": [8]}


def test_a_resumed_run_takes_later_events_out_and_keeps_its_own_step(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=8)
    assert _run(tmp_path, _Resumed(4), max_steps=6)["train/loss"] == [2, 4, 6]


class _Marks(Callback):
    """Gives a logger a text after each window, skipped or not, before that logger is called."""

    def __init__(self, logger: TensorBoardLogger) -> None:
        self.logger = logger

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.logger.add_text(run, "windows", f"window {run.state.attempts}")

    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self.on_step_end(run, result)


def test_a_resumed_run_takes_out_what_a_later_skipped_window_left_at_its_own_step(
    tmp_path: Path,
) -> None:
    def train(*before: Callback) -> list[tuple[int, bytes]]:
        logger = TensorBoardLogger()
        callbacks = [*before, Skips(2), _Marks(logger), logger]
        fit(make_trainer(callbacks=callbacks, output_dir=tmp_path, max_steps=4))
        points = _read(tmp_path / "tensorboard").Tensors("windows/text_summary")
        return [(each.step, each.tensor_proto.string_val[0]) for each in points]

    windows = [(1, b"window 1"), (2, b"window 2"), (2, b"window 3"), (3, b"window 4")]
    windows.append((4, b"window 5"))
    assert train() == windows
    assert train(_Resumed(2)) == windows
    assert train(_Resumed(2, skipped_steps=1)) == windows
    assert train(_Resumed(2)) == windows  # an older checkpoint than the one before
    assert len([*(tmp_path / "tensorboard").iterdir()]) == 7  # nothing is deleted


class _Shows(Callback):
    """Gives a logger an image, a figure and a text after each step."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def on_step_end(self, run: Run, result: StepResult) -> None:
        matplotlib = pytest.importorskip("matplotlib.figure")
        figure = matplotlib.Figure()
        figure.subplots().plot([0, 1])
        self.logger.add_image(run, "noise", torch.rand(3, 4, 5))
        self.logger.add_image(run, "mask", torch.ones(1, 4, 5, dtype=torch.uint8))
        self.logger.add_figure(run, "line", figure)
        self.logger.add_text(run, "said", f"step {run.state.step}")


def test_images_figures_and_texts_are_cut_back_by_a_resume_like_the_rest(tmp_path: Path) -> None:
    for before, steps in (((), 4), ((_Resumed(2),), 3)):
        logger = TensorBoardLogger()
        trainer = make_trainer(
            callbacks=[*before, logger, _Shows(logger)], output_dir=tmp_path, max_steps=steps
        )
        fit(trainer)
    events = _read(tmp_path / "tensorboard")
    for name in ("noise", "mask", "line", "said/text_summary"):
        assert [event.step for event in events.Tensors(name)] == [1, 2, 3]
    width, height, _ = events.Tensors("noise")[0].tensor_proto.string_val
    assert (width, height) == (b"5", b"4")
    assert events.Tensors("said/text_summary")[2].tensor_proto.string_val == [b"step 3"]


def test_an_image_of_another_shape_and_a_logger_without_images_are_refused(tmp_path: Path) -> None:
    class Flat(_Shows):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            self.logger.add_image(run, "flat", torch.rand(4, 5))

    logger = TensorBoardLogger()
    with pytest.raises(DataError, match=r"shape \(4, 5\), but must be \[channels, height, width\]"):
        fit(make_trainer(callbacks=[logger, Flat(logger)], output_dir=tmp_path))
    lines = JSONLLogger()
    with pytest.raises(ConfigError, match=r"no place for images.*TensorBoardLogger"):
        fit(make_trainer(callbacks=[lines, _Shows(lines)], output_dir=tmp_path / "lines"))
    with pytest.raises(ConfigError, match="was given `add_image`, but is not among the callbacks"):
        fit(make_trainer(callbacks=[_Shows(TensorBoardLogger(tmp_path / "other"))]))


def test_a_new_run_in_the_same_folder_shows_alone(tmp_path: Path) -> None:
    _run(tmp_path, max_steps=8)
    assert _run(tmp_path, max_steps=4)["train/loss"] == [2, 4]


def test_a_failed_run_keeps_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough"):
        _run(tmp_path, FailsAt(5))
    assert _steps(tmp_path / "tensorboard") == {"train/loss": [2, 4]}


def test_a_directory_of_its_own_needs_no_output_dir(tmp_path: Path) -> None:
    fit(make_trainer(callbacks=[TensorBoardLogger(tmp_path / "curves")]))
    assert _steps(tmp_path / "curves")["eval/loss"] == [8]


def test_without_a_place_the_error_names_both_ways() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(output_dir=.*TensorBoardLogger\(directory="):
        fit(make_trainer(callbacks=[TensorBoardLogger()]))
