"""All loggers, over the same events: read back by what reads them, they say the same."""

import csv
import json
import math
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.callbacks.test_wandb_logger import _end_service, _read
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer
from trainkit import Accelerator, Callback, ConfigError, GeneralTracker, Run, StepResult
from trainkit.callbacks import (
    Checkpoint,
    CSVLogger,
    JSONLLogger,
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from trainkit.trackers.files import CSVTracker, JSONLTracker
from trainkit.trackers.mlflow import MLflowTracker

pytestmark = pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow")
Values = dict[tuple[str, int], float]
HPARAMS = {"lr": 0.1, "model": {"layers": [8, 2], "bias": True}, "note": None}


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    # Folders are made within milliseconds, where a database takes seconds.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    _end_service()  # it would go on with the mode of an earlier test
    yield
    _end_service()


# How each is read.


def _named(name: str, kind: str) -> str:
    return f"train/{name}" if kind == "train" else name


def _from_lines(folder: Path) -> Values:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return _from_rows(lines)


def _from_csv(folder: Path) -> Values:
    header, *rows = _rows(folder / "metrics.csv")
    return _from_rows(dict(zip(header, row, strict=True)) for row in rows)


def _from_rows(rows: Any) -> Values:
    place = {"step", "epoch", "samples", "kind", "time/seconds"}
    return {
        (_named(name, row.get("kind", "")), int(row["step"])): float(value)
        for row in rows
        for name, value in row.items()
        if name not in place and value != ""
    }


def _from_tensorboard(folder: Path) -> Values:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {(tag, event.step): event.value for tag in tags for event in events.Scalars(tag)}


def _from_wandb(folder: Path) -> Values:
    rows = [row for read in _read(folder) for row in read.rows]
    return {
        (name, row["step"]): math.nan if value == "NaN" else value
        for row in rows
        for name, value in row.items()
        if name != "step"
    }


def _from_mlflow(run_id: str | None = None, uri: str | None = None) -> Values:
    client = _client(uri)
    run = client.get_run(run_id) if run_id else _only_run(client)
    return {
        (name, each.step): each.value
        for name in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, name)
    }


def _client(uri: str | None = None) -> Any:
    from mlflow import MlflowClient  # takes seconds

    return MlflowClient(uri)


def _only_run(client: Any) -> Any:
    places = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(places)
    return run


# The same events.


class _Extra(Callback):
    """Logs a value that is no number, one whose name comes later, and one after the last step."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.log({"none": math.nan, **({"later": 3.0} if run.state.step > 4 else {})}, reduce="last")

    def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
        run.log({"late": 0.5})


def _in_a_trainer(folder: Path) -> Path:
    loggers = [JSONLLogger(), CSVLogger(), TensorBoardLogger(), WandbLogger(), MLflowLogger()]
    callbacks = [_Extra(), *loggers]
    settings = {"log_every_n_steps": 2, "hparams": HPARAMS, "output_dir": folder}
    fit(make_trainer(callbacks=callbacks, **settings))
    return folder / "tensorboard"


def _in_a_loop(folder: Path) -> Path:
    names = ["jsonl", "csv", "tensorboard", "wandb", "mlflow"]
    accelerator = Accelerator(cpu=True, log_with=names, project_dir=folder.parent)
    accelerator.init_trackers(
        folder.name, config=HPARAMS, init_kwargs={"wandb": {"dir": str(folder)}}
    )
    for step in (2, 4, 6, 8):
        values = {"train/loss": torch.tensor(1 / step), "train/none": math.nan}
        accelerator.log(values | ({"train/later": 3} if step > 4 else {}), step=step)
    accelerator.log({"eval/loss": 0.25, "train/late": 0.5}, step=8)
    accelerator.end_training()
    return folder


@pytest.mark.parametrize("log", with_few([_in_a_loop], [_in_a_trainer, _in_a_loop]))
def test_all_loggers_say_the_same_of_the_same_events(
    tmp_path: Path, log: Callable[[Path], Path]
) -> None:
    folder = tmp_path / "run"
    board = log(folder)
    expected = _from_lines(folder)
    assert {*expected} == {
        *[(name, step) for name in ("train/loss", "train/none") for step in (2, 4, 6, 8)],
        *[("train/later", 6), ("train/later", 8), ("eval/loss", 8), ("train/late", 8)],
    }
    same = pytest.approx(expected, rel=1e-6, nan_ok=True)  # TensorBoard has 32 bits
    assert _from_csv(folder) == same
    assert _from_tensorboard(board) == same
    assert _from_wandb(folder) == same
    assert _from_mlflow() == same
    _check_hparams(folder, board)


def _check_hparams(folder: Path, board: Path) -> None:
    assert json.loads((folder / "metrics.hparams.json").read_text()) == HPARAMS
    config = _read(folder)[0].config
    assert {name: config[name] for name in HPARAMS} == HPARAMS
    run = _only_run(_client())
    assert run.info.status == "FINISHED"
    flat = {"lr": "0.1", "model.layers": "[8, 2]", "model.bias": "True", "note": "None"}
    assert run.data.params == flat
    experiment, group = _hparams_page(board)
    assert {info.name for info in experiment.hparam_infos} == {*flat}
    names = {info.name.tag for info in experiment.metric_infos}
    assert {"train/loss", "eval/loss"} <= names
    assert group.hparams["lr"].number_value == 0.1
    assert group.hparams["model.bias"].bool_value is True
    assert group.hparams["model.layers"].string_value == "[8, 2]"
    values = {value.name.tag: value.value for value in group.metric_values}
    assert values["eval/loss"] == pytest.approx(_from_lines(folder)["eval/loss", 8])


def _hparams_page(board: Path) -> tuple[Any, Any]:
    """Return what TensorBoard's page HPARAMS shows of the only run in a folder."""
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins import base_plugin
    from tensorboard.plugins.hparams import (
        api_pb2,
        backend_context,
        get_experiment,
        list_session_groups,
    )

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRun(str(board), "run")
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(board))
    context = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request: Any = RequestContext()
    experiment = get_experiment.Handler(
        request, context, "", api_pb2.GetExperimentRequest(include_metrics=True)
    ).run()
    columns = [
        *[api_pb2.ColParams(hparam=info.name) for info in experiment.hparam_infos],
        *[api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos],
    ]
    asked = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=9,
        col_params=columns,
        allowed_statuses=[0, 1, 2, 3],
        include_metrics=True,
    )
    found = list_session_groups.Handler(request, context, "", asked).run()
    (group,) = found.session_groups
    return experiment, group


# A run that is killed, and goes on.


class _Later(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step > 10:
            run.log({"new": 1.0})


class _Kills(Callback):
    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if run.state.step == 11:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: Path, *loggers: Callback, lr: float) -> None:
    callbacks = [_Later(), *loggers, Checkpoint(every_n_steps=3)]
    settings = {"max_epochs": 2, "log_every_n_steps": 1, "output_dir": folder}
    fit(make_trainer(callbacks=callbacks, hparams={"lr": lr}, **settings), resume="auto")


def _all_loggers(uri: str) -> list[Callback]:
    services = [WandbLogger(), MLflowLogger("toy", tracking_uri=uri)]
    return [JSONLLogger(), CSVLogger(), TensorBoardLogger(), *services]


def _ended(train: Callable[[], None]) -> int | None:
    """Train in a fork; return how it ended."""
    process = get_context("fork").Process(target=train)
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, to mlflow
def test_a_run_that_was_killed_goes_on_in_every_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, whole, uri = tmp_path / "killed", tmp_path / "whole", f"sqlite:///{tmp_path}/mlflow.db"
    killed = _ended(lambda: _train(folder, *_all_loggers(uri), _Kills(), lr=1))
    assert killed == -signal.SIGKILL, capfd.readouterr()
    assert _only_run(_client(uri)).info.status == "RUNNING"
    with pytest.warns(UserWarning, match="keeps the first value of `lr`, which MLflow never"):
        _train(folder, *_all_loggers(uri), lr=2)
    told = capfd.readouterr().out
    assert "other hyperparameters are recorded now: `lr` was 1 and is 2." in told
    _train(whole, JSONLLogger(), CSVLogger(), lr=2)

    expected = _from_lines(whole)
    assert [step for name, step in expected if name == "train/loss"] == [*range(1, 17)]
    assert _from_lines(folder) == _from_csv(folder) == _from_csv(whole) == expected
    counters = [[row[:4] for row in _rows(place / "metrics.csv")] for place in (folder, whole)]
    assert counters[0] == counters[1]
    assert _from_tensorboard(folder / "tensorboard") == pytest.approx(expected, rel=1e-6)
    first, second = (folder / "wandb").glob("offline-run-*")
    assert first.name.rpartition("-")[2] == second.name.rpartition("-")[2]  # the id
    # What reached the process of W&B just before the kill it may not have written.
    later = {(name, step): value for (name, step), value in expected.items() if step > 9}
    assert _from_wandb(folder).items() >= later.items()
    assert _from_mlflow(uri=uri) == expected
    run = _only_run(_client(uri))
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "1"})


# Files.


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return [*csv.reader(file)]


def test_a_name_that_comes_later_is_a_new_column(tmp_path: Path) -> None:
    tracker = CSVTracker("run", tmp_path)
    tracker.start()
    tracker.log({"a": 1.5, 'odd, "name"': 2}, step=1)
    tracker.log({"b": math.inf, "a": torch.tensor(2.0)}, step=2)
    tracker.log({"a": 3, "list": [1, 2]}, step=3)
    tracker.finish()
    head, *rows = _rows(tmp_path / "run" / "metrics.csv")
    assert head == ["step", "a", 'odd, "name"', "time/seconds", "b", "list"]
    assert [[*row[:3], *row[4:]] for row in rows] == [
        ["1", "1.5", "2", "", ""],
        ["2", "2.0", "", "Infinity", ""],
        ["3", "3", "", "", "[1, 2]"],
    ]


@pytest.mark.parametrize("kind", [CSVTracker, JSONLTracker])
def test_half_a_line_of_a_killed_loop_goes(tmp_path: Path, kind: Any) -> None:
    for step in (1, 2):
        tracker = kind("run", tmp_path)
        tracker.start()
        tracker.log({"a": step}, step=step)
        tracker.finish()
        with tracker.path.open("a") as file:
            file.write('{"st')  # as if it had been killed
    tracker = kind("run", tmp_path)
    tracker.start()
    tracker.finish()
    lines = tracker.path.read_text().splitlines()
    assert len([line for line in lines if '{"st' in line and "time" not in line]) == 0
    assert len(lines) == (3 if kind is CSVTracker else 2)


def test_a_new_run_keeps_the_table_of_the_old_with_its_hyperparameters(tmp_path: Path) -> None:
    for lr in (1, 2):
        trainer = make_trainer(
            callbacks=[CSVLogger()],
            output_dir=tmp_path,
            log_every_n_steps=8 // lr,
            hparams={"lr": lr},
        )
        fit(trainer)
    assert [len(_rows(tmp_path / f"metrics.csv{end}")) for end in (".1", "")] == [3, 4]
    kept = [tmp_path / f"metrics.hparams.json{end}" for end in (".1", "")]
    assert [json.loads(path.read_text()) for path in kept] == [{"lr": 1}, {"lr": 2}]


@pytest.mark.parametrize(
    ("content", "is_ours", "kept"),
    [
        ("dear,diary\n1,2\n", False, 2),
        ("dear,diary\n", False, 1),
        ("step,a\n", True, 1),
        ("step,a\n1,2\nodd\n2,3\nodd\n3,4\nodd\n", True, 5),
        ("step,a\n3,4\n", True, 1),
    ],
)
def test_a_table_is_cut_behind_the_last_wanted_row(
    tmp_path: Path, content: str, is_ours: bool, kept: int
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    assert CSVTracker("", tmp_path).cut(lambda entry: int(entry["step"]) <= 2) == is_ours
    assert path.read_text().splitlines() == content.splitlines()[:kept]


def test_no_name_and_no_text_becomes_a_formula(tmp_path: Path) -> None:
    for _ in range(2):  # the second goes on in the table of the first
        tracker = CSVTracker("run", tmp_path)
        tracker.start()
        tracker.log({"=cmd": -1.5, "+a": "=1+1", "low": -math.inf, "b": "@x"}, step=1)
        tracker.finish()
    head, *rows = _rows(tmp_path / "run" / "metrics.csv")
    assert head == ["step", "'=cmd", "'+a", "low", "b", "time/seconds"]
    assert [row[:5] for row in rows] == [["1", "-1.5", "'=1+1", "-Infinity", "'@x"]] * 2


def test_a_table_cannot_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.csv")
    with pytest.raises(ConfigError, match=r"metrics.csv` is no ordinary file"):
        CSVTracker("", tmp_path).start()


def _twice(first: Callback, second: Callback) -> Callable[[Path], None]:
    second.name = "second"

    def train(folder: Path) -> None:
        fit(make_trainer(callbacks=[first, second], output_dir=folder))

    return train


def _one_tracker_twice(folder: Path) -> None:
    own = JSONLTracker("run", folder)
    Accelerator(cpu=True, log_with=["jsonl", own], project_dir=folder).init_trackers("run")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (_twice(JSONLLogger(), JSONLLogger()), "`JSONLLogger` and `second` would both write to `"),
        (_twice(CSVLogger(), CSVLogger()), "`CSVLogger` and `second` would both write to"),
        (_twice(TensorBoardLogger(), TensorBoardLogger()), "tensorboard`. Leave one of them out"),
        (_one_tracker_twice, "`log_with[0]` and `log_with[1]` would both write to"),
    ],
)
def test_two_loggers_of_one_file_are_refused(
    tmp_path: Path, log: Callable[[Path], None], words: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        log(tmp_path)


# TensorBoard and its hyperparameters.


def test_a_new_run_shows_its_own_hyperparameters(tmp_path: Path) -> None:
    for lr in (1, 2):
        fit(make_trainer(callbacks=[TensorBoardLogger()], output_dir=tmp_path, hparams={"lr": lr}))
    for name, lr in (("tensorboard.1", 1), ("tensorboard", 2)):
        _, group = _hparams_page(tmp_path / name)
        assert group.hparams["lr"].number_value == lr


# MLflow.


def test_what_mlflow_does_not_take_is_changed_or_named() -> None:
    tracker = MLflowTracker("toy", run_name="first", tags={"team": "a"})
    state = torch.get_rng_state()
    before = random.getstate()
    tracker.start()
    assert random.getstate() == before  # it draws a name for the run
    assert torch.equal(torch.get_rng_state(), state)
    tracker.store_init_configuration({f"p{number}": number for number in range(250)})
    tracker.log({"f1[cat]": 1.0, "/a//b": 2.0, "ok": True}, step=3)
    with pytest.warns(UserWarning, match="leaves out `text`, as MLflow takes only numbers"):
        tracker.log({"text": "x", "ok": 2}, step=4)
    tracker.finish()
    run = tracker.tracker
    assert len(run.data.params) == 250
    assert (run.info.run_name, run.data.tags["team"]) == ("first", "a")
    assert run.data.metrics == {"f1_cat_": 1.0, "a/b": 2.0, "ok": 2.0}


def test_a_server_that_is_away_costs_no_training_and_no_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = MLflowTracker()
    tracker.start()
    client, tracker.client = tracker.client, _Away()
    with pytest.warns(UserWarning, match="keeps its values until that works: nobody there"):
        tracker.log({"a": 1}, step=1)
    tracker.log({"a": 2}, step=2)  # is not tried, for a while
    tracker.client = client
    tracker.finish()
    assert _from_mlflow(tracker.run_id) == {("a", 1): 1, ("a", 2): 2}


class _Away:
    def log_batch(self, *_: Any, **__: Any) -> None:
        raise OSError("nobody there")


def test_an_mlflow_that_cannot_be_used_is_said_before_the_first_step() -> None:
    logger = MLflowLogger(tracking_uri="nowhere://x")
    with pytest.raises(ConfigError, match="`MLflowLogger` cannot use MLflow at `nowhere://x`: "):
        fit(make_trainer(callbacks=[logger]))


def test_a_run_that_mlflow_lost_is_begun_anew(tmp_path: Path) -> None:
    first, second = MLflowLogger(), MLflowLogger(tracking_uri=f"file://{tmp_path}/other")
    fit(make_trainer(callbacks=[first, Checkpoint()], output_dir=tmp_path))
    trainer = make_trainer(callbacks=[second, Checkpoint()], output_dir=tmp_path, max_epochs=2)
    with pytest.warns(UserWarning, match=f"finds no run {first.run_id} to go on with, and begins"):
        fit(trainer, resume="must", schedule="keep")
    assert second.run_id != first.run_id


class _Draws(Callback):
    """Gives a logger an image, a figure and a text after each step."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def on_step_end(self, run: Run, result: StepResult) -> None:
        from matplotlib.figure import Figure

        self.logger.add_image(run, "shown/noise", torch.rand(3, 4, 5))
        self.logger.add_figure(run, "line", Figure())
        self.logger.add_text(run, "said", "well")


def test_services_take_images_figures_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    mlflow, wandb = MLflowLogger(), WandbLogger(mode="offline", directory=tmp_path)
    for logger in (mlflow, wandb):
        fit(make_trainer(max_steps=2, callbacks=[logger, _Draws(logger)]))
    found = [file.path for file in _client().list_artifacts(mlflow.run_id, "shown/noise")]
    assert found == [f"shown/noise/step-0000000{step}.png" for step in (1, 2)]
    assert [file.path for file in _client().list_artifacts(mlflow.run_id, "said")] == [
        f"said/step-0000000{step}.txt" for step in (1, 2)
    ]
    images = [path.name for path in tmp_path.rglob("wandb/offline-run-*/files/media/**/*.png")]
    assert sorted(name.split("_")[0] for name in images) == ["line", "line", "noise", "noise"]


def test_mlflow_knows_how_a_run_ended() -> None:
    class Fails(Callback):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            raise ArithmeticError("enough")

    logger = MLflowLogger()
    with pytest.raises(ArithmeticError):
        fit(make_trainer(callbacks=[logger, Fails()]))
    assert _client().get_run(logger.run_id).info.status == "FAILED"


def test_without_mlflow_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match="`pip install mlflow`, or the smaller `pip install mlf"):
        MLflowLogger()
    with pytest.raises(ConfigError, match='`log_with="mlflow"` needs the package `mlflow`'):
        Accelerator(cpu=True, log_with="mlflow")


# One's own.


class _Own(GeneralTracker):
    name = "own"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.seen.append((step, sorted(values)))

    def finish(self) -> None:
        self.seen.append(self.exit_code)


def test_a_tracker_of_ones_own_works_in_a_trainer() -> None:
    own = _Own()
    fit(make_trainer(callbacks=[Logger(own)], log_every_n_steps=4, hparams={"a": 1}))
    logged = [(4, ["train/loss"]), (8, ["train/loss"]), (8, ["eval/loss"])]
    assert own.seen == [{"a": 1}, *logged, 0]
    with pytest.raises(ConfigError, match=r"must be a `trainkit\.GeneralTracker`, but is 'csv'"):
        Logger("csv")  # type: ignore[arg-type]
