"""A search as a new user writes it: settings in a dataclass, a folder for each run, all loggers."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from tests.helpers.scripts import run_forked
from trainkit.cli.main import main

SCRIPT = """
import json
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer
from trainkit.callbacks import (
    Checkpoint, CSVLogger, Evaluation, JSONLLogger, MLflowLogger, ProgressBar, TensorBoardLogger
)

@dataclass
class Model:
    width: int = 8
    bias: bool = True

@dataclass
class Settings:
    lr: float = 0.05
    model: Model = field(default_factory=Model)

class Prints(Trainer):
    def training_step(self, model, batch):
        if self.run.state.epoch_samples == 0:
            self.processes.print("a line of mine")
        return super().training_step(model, batch)

inputs = torch.randn(120, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())
train, held_out = torch.utils.data.random_split(data, [80, 40], torch.Generator().manual_seed(1))

for width in (4, 16, 32):
    settings = Settings(model=Model(width))
    torch.manual_seed(0)
    trainer = Prints(
        max_epochs=3, hparams=settings, output_dir="runs/search", new_run=True, split_batches=True,
        log_every_n_steps=2,
        callbacks=[
            ProgressBar(), Evaluation(["accuracy"]), CSVLogger(), JSONLLogger(),
            TensorBoardLogger(), MLflowLogger(run_name=f"width {width}"),
            Checkpoint(keep_best=("eval/accuracy", "max", 2), weights_only=True),
        ],
    )
    model = nn.Sequential(
        nn.Linear(8, width, bias=settings.model.bias), nn.Tanh(), nn.Linear(width, 2)
    )
    result = trainer.fit(
        model, (DataLoader(train, 8, shuffle=True), DataLoader(held_out, 8)),
        optimizer=partial(torch.optim.AdamW, lr=settings.lr), loss_fn=nn.CrossEntropyLoss(),
        restore_best=True,
    )
    tested = trainer.test(model, DataLoader(held_out, 8), metrics=["accuracy"])
    told = result.best_value, result.best_step, tested["test/accuracy"], result.metrics["eval/loss"]
    trainer.processes.print("told", json.dumps(told))
"""


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.chdir(tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_search_is_recorded_everywhere_alike_and_listed(
    size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlflow = pytest.importorskip("mlflow")
    (script := tmp_path / "search.py").write_text(SCRIPT)
    lines = run_forked(script, size=size).output.splitlines()
    told = [json.loads(line[5:]) for line in lines if line.startswith("told ")]
    assert len(told) == 3
    for best, _, tested, _ in told:
        assert best == tested
    assert lines.count("a line of mine") == 9
    rows = [line for line in lines if "eval loss" in line]
    assert len(rows) == 9
    assert all(len(row) < 80 and " train loss " in row for row in rows)

    capsys.readouterr()
    assert main(["runs", "ls", "runs", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    client = mlflow.MlflowClient()
    for width, run, (best, step, _, last) in zip((4, 16, 32), runs, told, strict=True):
        wanted = {"lr": 0.05, "model.width": width, "model.bias": True}
        folder = Path(run["run"])
        found = run["best"]["eval/accuracy"]
        assert (run["hparams"], run["state"]) == (wanted, "finished")
        assert (found["value"], found["step"], found["higher_is_better"]) == (best, step, True)

        nested = {"lr": 0.05, "model": {"width": width, "bias": True}}
        newest = sorted((folder / "checkpoints").iterdir())[-1]
        assert json.loads((newest / "manifest.json").read_text())["metadata"]["hparams"] == nested
        assert json.loads((folder / "metrics.hparams.json").read_text()) == nested

        loss = {int(row["step"]): float(row["eval/loss"]) for row in _rows(folder, "eval/loss")}
        assert loss[30] == last
        values, hparams = _of_tensorboard(folder)
        assert values == pytest.approx(loss)
        assert hparams == wanted
        (there,) = client.search_runs(["0"], f"run_name = 'width {width}'")
        history = client.get_metric_history(there.info.run_id, "eval/loss")
        assert {each.step: each.value for each in history} == loss
        assert there.data.params == {name: str(value) for name, value in wanted.items()}

    assert main(["report", "runs/search", "-o", "page.html"]) == 0
    assert '"name":"model.width","values":[4,16,32]' in Path("page.html").read_text()


def _rows(folder: Path, name: str) -> Iterator[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        yield from (row for row in csv.DictReader(file) if row[name])


def _of_tensorboard(folder: Path) -> tuple[dict[int, float], dict[str, Any]]:
    (file,) = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
    events.Reload()
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    started = HParamsPluginData.FromString(content).session_start_info.hparams
    values = {name: getattr(v, v.WhichOneof("kind")) for name, v in started.items()}
    return {event.step: event.value for event in events.Scalars("eval/loss")}, values
