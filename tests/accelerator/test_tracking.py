"""Trackers and loggers of Accelerate under their names: the same on both sides."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

import trainkit.accelerate_compat as ours
from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from trainkit.accelerator import tracking
from trainkit.errors import ConfigError

theirs = late("accelerate")


@pytest.fixture(autouse=True)
def _what_is_registered_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "KINDS", dict(tracking.KINDS))


BOTH = pytest.mark.parametrize("lib", [theirs, ours], ids=["accelerate", "trainkit"])


def lines_class(lib: Any, *, only_main: bool = True) -> Any:
    """Return a class of trackers as the documentation of Accelerate has one."""
    on_main_process = lib.tracking.on_main_process

    class Lines(lib.tracking.GeneralTracker):  # type: ignore[misc]
        name = "lines"
        requires_logging_directory = True
        main_process_only = only_main

        def __init__(self, run_name: str, logging_dir: str, suffix: str = "") -> None:
            self.path = Path(logging_dir) / f"{run_name}{suffix}"
            self.tracker = self.lines = list[Any]()  # a property does as well

        @on_main_process  # type: ignore[untyped-decorator]
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            self.lines.append(values)

        @on_main_process  # type: ignore[untyped-decorator]
        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            self.lines.append((values, step))

    return Lines


def tracked(lib: Any, folder: Path, *, only_main: bool = True) -> list[Any]:
    lib.tracking.register_tracker_class(lines_class(lib, only_main=only_main))
    accelerator = lib.Accelerator(cpu=True, log_with="lines", project_dir=str(folder))
    accelerator.init_trackers("run", {"lr": 0.1}, init_kwargs={"lines": {"suffix": ".txt"}})
    accelerator.log({"loss": 1.0}, step=3)
    lines = list(accelerator.get_tracker("lines", unwrap=True)) if accelerator.trackers else []
    places = [tracker.path for tracker in accelerator.trackers]
    accelerator.end_training()
    return [*lines, *(path.relative_to(folder).as_posix() for path in places)]


@BOTH
@pytest.mark.filterwarnings("ignore")  # that the name is taken, by the last test's
def test_a_class_is_registered_by_its_name(lib: Any, tmp_path: Path) -> None:
    assert tracked(lib, tmp_path) == [{"lr": 0.1}, ({"loss": 1.0}, 3), "run.txt"]


def _on_each(rank: int, folder: Path, only_main: bool) -> list[Any]:
    return [line for line in tracked(ours, folder, only_main=only_main) if line != "run.txt"]


@pytest.mark.filterwarnings("ignore")
def test_a_method_runs_on_the_main_process_alone(tmp_path: Path) -> None:
    noted = [{"lr": 0.1}, ({"loss": 1.0}, 3)]
    assert run_ranks(2, _on_each, tmp_path, True) == [noted, []]
    assert run_ranks(2, _on_each, tmp_path, False) == [noted, noted]


@pytest.mark.parametrize("wrong", [int, object(), ours.tracking.GeneralTracker])
def test_what_is_no_tracker_is_not_registered(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="`tracker_class` must be a class over `GeneralTracker`"):
        ours.tracking.register_tracker_class(wrong)


@BOTH
def test_a_class_says_whether_it_needs_the_folder_of_logs(lib: Any) -> None:
    class Silent(lib.tracking.GeneralTracker):  # type: ignore[misc]
        name = "silent"

    with pytest.raises(ValueError, match="requires_logging_directory"):
        lib.tracking.register_tracker_class(Silent)


def test_a_name_that_is_taken_is_said() -> None:
    own = lines_class(ours)
    own.name = "wandb"
    with pytest.warns(UserWarning, match="`Lines` takes the place of the tracker 'wandb'"):
        ours.tracking.register_tracker_class(own)
    ours.tracking.register_tracker_class(own)  # once more is no news


@BOTH
def test_without_trackers_a_blank_one_is_found(lib: Any) -> None:
    found = lib.Accelerator(cpu=True).get_tracker("wandb")
    assert isinstance(found, lib.tracking.GeneralTracker)
    assert found.log({"loss": 1.0}) is None


@BOTH
def test_tensorboard_has_the_settings_as_yaml(lib: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = {"lr": 1e-05, "name": "a", "flag": True, "layers": 3}
    accelerator = lib.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run", dict(settings))
    accelerator.end_training()
    (path,) = (tmp_path / "run").glob("*/hparams.yml")
    assert yaml.safe_load(path.read_text()) == settings
    float(path.parent.name)  # when it began


@BOTH
@pytest.mark.filterwarnings("ignore")  # of its files
def test_mlflow_keeps_files_texts_and_what_is_above(
    lib: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/runs")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "note.txt").touch()
    options = {
        "logging_dir": f"file://{tmp_path}/artifacts",
        "tags": '{"team": "a"}',
        "nested_run": True,
        "run_name": "first",
        "description": "what it is",
    }
    accelerator = lib.Accelerator(cpu=True, log_with="mlflow")
    with mlflow.start_run() as above:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
        accelerator.init_trackers("own", init_kwargs={"mlflow": options})
        tracker = accelerator.get_tracker("mlflow")
        tracker.log_artifact(tmp_path / "notes" / "note.txt", artifact_path="one")
        tracker.log_artifacts(str(tmp_path / "notes"), artifact_path="all")
        accelerator.log({"loss": 1.0}, step=2, log_kwargs={"mlflow": {"timestamp": 7}})
        later = {"mlflow": {"synchronous": False, "timestamp": 8}}
        accelerator.log({"loss": 2.0}, step=3, log_kwargs=later)
        mlflow.flush_async_logging()
        tracker.store_init_configuration({"lr": 0.1, "text": "x" * 6001})
        run_id = tracker.active_run.info.run_id
        assert accelerator.get_tracker("mlflow", unwrap=True).info.run_id == run_id
        accelerator.end_training()
    run = mlflow.get_run(run_id)
    assert mlflow.get_experiment(run.info.experiment_id).name == "of the environment"
    assert run.info.artifact_uri.startswith(f"file://{tmp_path}/artifacts")
    assert (run.info.run_name, run.data.tags["team"]) == ("first", "a")
    assert run.data.tags["mlflow.note.content"] == "what it is"
    assert run.data.tags["mlflow.parentRunId"] == above.info.run_id
    assert run.data.params == {"lr": "0.1"}
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    values = [(each.value, each.step, each.timestamp) for each in history]
    assert values == [(1.0, 2, 7), (2.0, 3, 8)]
    found = [
        each.path
        for folder in ("one", "all")
        for each in mlflow.artifacts.list_artifacts(run_id=run_id, artifact_path=folder)
    ]
    assert found == ["one/note.txt", "all/note.txt"]


@BOTH
def test_a_folder_that_is_missing_is_named_at_once(lib: Any) -> None:
    with pytest.raises(ValueError, match="tensorboard"):
        lib.Accelerator(cpu=True, log_with="tensorboard")


@BOTH
def test_a_warning_is_said_once(lib: Any, caplog: pytest.LogCaptureFixture) -> None:
    lib.Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING, logger="once"):
        for _ in range(2):
            for text in ("a %s", "b %s"):
                lib.logging.get_logger("once").warning_once(text, "c")
    said = [record.getMessage().removeprefix("[RANK 0] ") for record in caplog.records]
    # Each logger of Accelerate counts for itself, as two of one name are equal in nothing else.
    assert said in (["a c", "b c"], ["a c", "b c", "a c", "b c"])


def test_a_warning_names_who_said_it(caplog: pytest.LogCaptureFixture) -> None:
    logger = ours.logging.get_logger("once more")
    logger.warning_once("said")
    assert [record.filename for record in caplog.records] == [Path(__file__).name]
