"""Tests of the logger of Weights & Biases in its offline mode; its files are read as they are."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.callbacks import At, FailsAt
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError
from trainkit.basics.signals import Interrupted
from trainkit.callbacks import Checkpoint, GradientMonitor, Throughput, WandbLogger
from trainkit.checkpoint.forms import Unfit

BLOCK = 32768  # bytes; the files have the format of LevelDB's log after 7 bytes of their own
OWN_HEADER = b":W&B"


@pytest.fixture(autouse=True)
def _quiet_and_ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    _end_service()


def _end_service() -> None:
    """End the process that writes for wandb, so that all is written."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is not None:
        wandb.teardown()


def _records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    data, at, text = path.read_bytes(), 7, b""
    assert data.startswith(OWN_HEADER)
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        text += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = messages.Record()
            record.ParseFromString(text)
            text = b""
            yield record


class _Read:
    """What stands in the file of one W&B run."""

    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.axes: dict[str, str] = {}
        for record in _records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.id = record.run.run_id
                self.project = record.run.project
                self.name = record.run.display_name
            elif kind == "config":
                self.config |= {u.key: json.loads(u.value_json) for u in record.config.update}
            elif kind == "metric" and record.metric.step_metric:
                axis = record.metric.glob_name or record.metric.name
                self.axes[axis] = record.metric.step_metric
            elif kind == "exit":
                self.exit_code = record.exit.exit_code
            elif kind == "history":
                items = {i.key or ":".join(i.nested_key): i for i in record.history.item}
                own = {k: i for k, i in items.items() if not k.startswith("_")}
                row = {k: json.loads(i.value_json) for k, i in own.items()}
                self.rows.append({"step": record.history.step.num} | row)


def _read(folder: Path) -> list[_Read]:
    _end_service()
    return [_Read(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _fit(folder: Path, *others: Callback, resume: str | None = None, **options: Any) -> None:
    logger = WandbLogger("tiny", mode="offline", **options)
    callbacks = [logger, *others, Checkpoint()]
    settings = {"max_epochs": 2, "log_every_n_steps": 4, "output_dir": folder}
    fit(make_trainer(callbacks=callbacks, **settings), resume=resume)


def test_figures_stand_over_the_step_with_what_the_run_is_made_of(tmp_path: Path) -> None:
    _fit(tmp_path, Throughput(), name="first")
    (read,) = _read(tmp_path)
    assert (read.project, read.name, read.exit_code) == ("tiny", "first", 0)
    assert read.axes == {"*": "step"}
    facts = read.config["trainkit"]
    assert facts["config"]["max_epochs"] == 2
    assert facts["run"]["model"] == "Sequential"
    steps = {
        kind: [row["step"] for row in read.rows if kind in row]
        for kind in ("train/loss", "train/time/samples_per_second", "eval/loss")
    }
    assert steps == {
        "train/loss": [4, 8, 12, 16],
        "train/time/samples_per_second": [4, 8, 12, 16],
        "eval/loss": [8, 16],
    }


def test_a_configuration_is_taken_with_the_hyperparameters(tmp_path: Path) -> None:
    logger = WandbLogger(mode="offline", config={"lr": 0.2, "own": {"a": [1, None]}})
    fit(make_trainer(callbacks=[logger], output_dir=tmp_path, hparams={"lr": 0.1, "b": True}))
    (read,) = _read(tmp_path)
    assert read.config.keys() - {"_wandb"} == {"lr", "b", "own", "trainkit"}
    assert [read.config[name] for name in ("lr", "b", "own")] == [0.2, True, {"a": [1, None]}]
    with pytest.raises(ConfigError, match=r"`config\.loss` is of the type `function`"):
        WandbLogger(config={"loss": lambda: 0})


def test_a_resumed_fit_goes_on_in_the_same_run_and_an_exception_is_a_failure(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="enough"):
        _fit(tmp_path, FailsAt(13))
    _fit(tmp_path, resume="auto")
    first, second = _read(tmp_path)
    assert first.id == second.id
    assert (first.exit_code, second.exit_code) == (1, 0)
    losses = [
        {row["step"]: row["train/loss"] for row in read.rows if "train/loss" in row}
        for read in (first, second)
    ]
    assert list(losses[0]) == [4, 8, 12]
    assert list(losses[1]) == [12, 16]
    assert losses[0][12] == losses[1][12]  # trained twice, to the same bits


def test_a_new_fit_is_a_new_run(tmp_path: Path) -> None:
    logger = WandbLogger(directory=tmp_path, mode="offline")
    for _ in range(2):
        fit(make_trainer(callbacks=[logger], log_every_n_steps=4))
    first, second = _read(tmp_path)
    assert first.id != second.id


def test_a_signal_ends_the_run_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        _fit(tmp_path, At(3, lambda run: run.internals.interrupts.ask(15)))
    (read,) = _read(tmp_path)
    assert read.exit_code == 143


def test_histograms_are_drawn(tmp_path: Path) -> None:
    logger = WandbLogger(directory=tmp_path, mode="offline")
    monitor = GradientMonitor(histograms=logger, bins=8)
    fit(make_trainer(callbacks=[logger, monitor], log_every_n_steps=4))
    (read,) = _read(tmp_path)
    name = "gradients/0.weight"
    (first, _) = (row for row in read.rows if f"{name}:_type" in row)
    assert (first["step"], first[f"{name}:_type"]) == (4, "histogram")
    assert (sum(first[f"{name}:values"]), len(first[f"{name}:bins"])) == (32, 9)


def test_a_histogram_outside_of_the_run_is_an_error() -> None:
    callback = GradientMonitor(histograms=WandbLogger())
    with pytest.raises(ConfigError, match="is not among the callbacks of the run"):
        fit(make_trainer(callbacks=[callback, WandbLogger(mode="disabled")], log_every_n_steps=4))


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"is not installed. Run `pip install wandb`"):
        WandbLogger()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nmae": "first"}, "given 'nmae', which it does not take. Of `wandb.init`"),
        ({"resume": "must"}, "given 'resume', which it does not take. It is set by trainkit"),
        ({"mode": "of"}, "`mode` must be one of"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WandbLogger(**options)


def test_a_strange_state_is_refused() -> None:
    run: Any = None
    with pytest.raises(Unfit, match="lacks the key 'run_id'"):
        WandbLogger().check_state_dict(run, {"id": "x"})
