"""What cannot be written is said before the first step; what fails later ends no training."""

import errno
import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.callbacks import Counts
from tests.helpers.ranks import run_ranks
from trainkit import Accelerator, Run, Trainer
from trainkit.accelerator.settings import ProjectConfiguration
from trainkit.basics.outputs import absolute, check_folder
from trainkit.basics.written_files import Lines, check_file
from trainkit.callbacks import (
    Checkpoint,
    JSONLLogger,
    MainProcess,
    Predictions,
    Profiler,
    TensorBoardLogger,
)
from trainkit.checkpoint import CheckpointStore
from trainkit.errors import CheckpointError, ConfigError, TrainkitError
from trainkit.trackers.files import JSONLTracker
from trainkit.training.callback import Callback
from trainkit.types import StepResult

sgd = partial(torch.optim.SGD, lr=0.1)


def _data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), batch_size=2)


def _fit(output_dir: Any, *callbacks: Callback, **options: Any) -> Trainer:
    trainer = Trainer(max_epochs=1, callbacks=callbacks, output_dir=output_dir, log_every_n_steps=1)
    loss_fn = nn.functional.mse_loss
    trainer.fit(nn.Linear(2, 1), (_data(), _data()), optimizer=sgd, loss_fn=loss_fn, **options)
    return trainer


def _file(place: Path) -> None:
    place.write_text("a file")


def _dangling(place: Path) -> None:
    place.symlink_to(place.with_name("nowhere"))


# What stands in the way, at which part of the output directory, for whom, and what is said.
WAYS: list[tuple[str, Callable[[Path], None], Callable[[], Callback] | None, str]] = [
    ("", _file, None, "`Trainer(output_dir=...)` writes to .* is a file, not a folder"),
    ("", _dangling, None, "is a link to `.*nowhere`, which does not exist"),
    ("checkpoints", _file, Checkpoint, "checkpoints` is a file, not a folder"),
    ("checkpoints", _dangling, Checkpoint, "checkpoints` is a link to"),
    ("metrics.jsonl", Path.mkdir, JSONLLogger, "`JSONLLogger` .*metrics.jsonl` is a folder"),
    ("metrics.events.jsonl", Path.mkdir, JSONLLogger, "metrics.events.jsonl` is a folder"),
    ("tensorboard", _file, TensorBoardLogger, "`TensorBoardLogger` .* is a file, not a folder"),
    ("profile", _file, Profiler, "`Profiler` .* is a file, not a folder"),
    ("predictions.jsonl", Path.mkdir, Predictions, "`Predictions` .* is a folder"),
]


@pytest.mark.parametrize(("name", "spoil", "callback", "words"), WAYS)
def test_what_cannot_be_written_is_said_before_the_first_step(
    tmp_path: Path,
    name: str,
    spoil: Callable[[Path], None],
    callback: Callable[[], Callback] | None,
    words: str,
) -> None:
    output = tmp_path / "run"
    if name:
        output.mkdir()
    spoil(output / name)
    steps = Counts()
    callbacks = [steps] if callback is None else [steps, callback()]
    with pytest.raises(TrainkitError, match=words.replace("(", r"\(").replace(")", r"\)")) as told:
        _fit(output, *callbacks)
    assert steps.steps == 0
    assert str(output / name) in str(told.value)
    assert "\n" not in str(told.value)


def _on_two(rank: int, folder: Path) -> str:
    logger = MainProcess(JSONLLogger(folder / "file" / "metrics.jsonl"))
    try:
        _fit(folder / "run", logger)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_all_processes_raise_what_the_main_process_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(2, _on_two, tmp_path)
    assert "is a file, not a folder" in first
    assert second == f"On process 0: {first}"


def _without_rights(rank: int, folder: Path) -> list[str]:
    os.setuid(65534)
    told = []
    actions: list[Callable[[], object]] = [
        lambda: _fit(folder / "run"),
        lambda: _fit(None, JSONLLogger(folder / "run" / "metrics.jsonl")),
        lambda: Accelerator(project_dir=folder / "run"),
        lambda: Accelerator().save_state(folder / "run"),
    ]
    for action in actions:
        with pytest.raises(TrainkitError) as error:
            action()
        told.append(str(error.value))
    return told


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give up its rights")
def test_a_missing_permission_is_said_in_a_sentence(tmp_path: Path) -> None:
    for place in (tmp_path, *tmp_path.parents[:-2]):
        place.chmod(0o755)
    (told,) = run_ranks(1, _without_rights, tmp_path)
    for text in told:
        assert f"{tmp_path}/run" in text
        assert "Permission denied" in text
        assert "make this one writable" in text


def test_a_trial_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    check_folder(tmp_path / "a" / "b", "x")
    check_file(tmp_path / "a" / "new", "x")
    check_file(tmp_path / "old", "x")
    check_file(Path("/dev/null"), "x")
    assert (tmp_path / "old").read_text() == "old"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "old"]


def test_a_full_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        check_folder(tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


# A disk that is full later.


class _Full:
    """A file on a disk that takes so many bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("ab", buffering=0), room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return taken

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines", "`X`")
    disk: Any = _Full(tmp_path / "lines", 10)
    lines._file.close()
    lines._file = disk
    lines.write("first")
    with pytest.warns(UserWarning, match=r"`X` cannot write .* No space left .* goes on"):
        lines.write("second")  # of which a part fits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines.write("third")  # says it once
        assert (tmp_path / "lines").read_text() == "first\n"
        disk.room = 100
        lines.write("fourth")
        assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\nfourth\n"
        disk.room = 0
        lines.write("fifth")
    with pytest.warns(UserWarning, match="lacks the last 1 lines of `X`"):
        lines.close()


class _FillsUp(Callback):
    """Puts a full disk under an open logger after the first step."""

    def __init__(self, logger: JSONLLogger) -> None:
        self._logger = logger

    def on_step_end(self, run: Run, result: StepResult) -> None:
        for lines in (self._logger._tracker.tracker, self._logger._events._file):  # type: ignore[union-attr]
            assert lines is not None
            os.dup2(os.open("/dev/full", os.O_WRONLY), lines._file.fileno())


def test_a_disk_that_fills_up_costs_lines_and_no_training(tmp_path: Path) -> None:
    logger, steps = JSONLLogger(), Counts()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _fit(tmp_path, _FillsUp(logger), logger, steps)
    assert sum("Training goes on" in str(each.message) for each in told) == 2  # once a file
    assert steps.steps == 4


class _Breaks(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.folder.write_text("in the way")


def test_predictions_that_cannot_be_written_end_no_training(tmp_path: Path) -> None:
    steps, place = Counts(), tmp_path / "of {step}"
    with pytest.warns(UserWarning, match="`Predictions` cannot write: .* are lost"):
        _fit(tmp_path, Predictions(place / "p.csv"), _Breaks(tmp_path / "of 4"), steps)
    assert steps.steps == 4


def test_a_checkpoint_that_cannot_be_written_ends_the_training(tmp_path: Path) -> None:
    class InTheWay(Callback):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            (tmp_path / "checkpoints").rename(tmp_path / f"away-{run.state.step}")
            (tmp_path / "checkpoints").write_text("")

    with pytest.raises(CheckpointError, match="Saving step 1 failed"):
        _fit(tmp_path, Checkpoint(every_n_steps=1), InTheWay())


# Where the program goes later.


def test_a_relative_path_is_that_of_the_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "{here}", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)

    class Leaves(Callback):
        def on_fit_start(self, run: Run) -> None:
            os.chdir(there)

    callbacks = [
        Leaves(),
        JSONLLogger("own/metrics.jsonl"),
        TensorBoardLogger("board"),
        Predictions("predictions-{step}.jsonl"),
        Profiler(wait=0, warmup=1, active=1, directory="traces"),
        Checkpoint(),
    ]
    trainer = Trainer(max_epochs=1, callbacks=callbacks, output_dir="run")
    project = ProjectConfiguration(project_dir="project", logging_dir=Path("logs"))
    tracker = JSONLTracker("name", "tracked")
    os.chdir(there)
    loss_fn = nn.functional.mse_loss
    result = trainer.fit(nn.Linear(2, 1), (_data(), _data()), optimizer=sgd, loss_fn=loss_fn)
    assert list(there.iterdir()) == []
    assert result.checkpoint is not None
    assert result.checkpoint.is_absolute()
    names = ["board", "own", "predictions-4.jsonl", "run", "traces"]
    assert sorted(path.name for path in here.iterdir()) == names
    assert all(list((here / name).iterdir()) for name in names if "." not in name)
    assert (project.project_dir, project.logging_dir) == ("project", Path("logs"))  # as given
    assert project.folder("project_dir") == str(here / "project")
    assert project.folder("logging_dir") == here / "logs"
    assert tracker.path == here / "tracked" / "name" / "metrics.jsonl"


def test_a_resume_and_a_state_are_where_the_call_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _fit("run", Checkpoint())
    newest = CheckpointStore(Path("run/checkpoints")).checkpoints()[-1].path

    class Leaves(Trainer):
        def configure_optimizer(self, model: nn.Module, optimizer: Any) -> torch.optim.Optimizer:
            (tmp_path / "there").mkdir()
            os.chdir(tmp_path / "there")
            return super().configure_optimizer(model, optimizer)

    trainer = Leaves(max_epochs=1, callbacks=[])
    options: Any = {"optimizer": sgd, "loss_fn": nn.functional.mse_loss, "resume": newest}
    assert trainer.fit(nn.Linear(2, 1), (_data(), _data()), **options).step == 4
    os.chdir(tmp_path)
    assert Accelerator().save_state("state") == str(tmp_path / "state")


def _without_a_place(rank: int, folder: Path) -> list[Any]:
    gone = folder / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    told = []
    for action in (
        lambda: Trainer(max_epochs=1, output_dir="run"),
        lambda: JSONLLogger("metrics.jsonl"),
        lambda: Accelerator(project_dir="project"),
        lambda: Accelerator().save_state("state"),
    ):
        with pytest.raises(ConfigError) as error:
            action()
        told.append(str(error.value))
    _fit(folder / "run", JSONLLogger(), TensorBoardLogger(), Checkpoint())
    Accelerator(project_dir=folder / "project").save_state(folder / "state")
    return told


def test_a_working_directory_that_is_gone_ends_no_run(tmp_path: Path) -> None:
    (told,) = run_ranks(1, _without_a_place, tmp_path)
    for text in told:
        assert "working directory of this process does not exist any more" in text
    events = (tmp_path / "run" / "metrics.events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["error"] is None


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="`output_dir` must be a path, but is 3"):
        absolute(3, "output_dir")
