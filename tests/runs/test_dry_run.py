"""`Trainer(dry_run=True)`: one step of everything, and nothing is kept."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Callback, ConfigError, Run
from trainkit.callbacks import (
    Checkpoint,
    EarlyStopping,
    Evaluation,
    JSONLLogger,
    LRFinder,
    Predictions,
    Profiler,
    Summary,
    TensorBoardLogger,
    WandbLogger,
)
from trainkit.training.callback import HOOKS

ROOT = Path(__file__).resolve().parents[2]


class Notes(Callback):
    """Notes which hooks came, and the learning rate of each step."""

    def __init__(self) -> None:
        self.hooks: set[str] = set()
        self.rates: list[float] = []


def _noting(hook: str) -> Any:
    def note(self: Notes, run: Run, *arguments: Any) -> None:
        self.hooks.add(hook)
        if hook == "on_step_start":
            self.rates.append(run.optimizer.param_groups[0]["lr"])

    return note


def notes() -> Notes:
    made: Notes = type("Notes", (Notes,), {hook: _noting(hook) for hook in HOOKS})()
    return made


def all_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_one_step_of_everything_as_the_real_run_begins() -> None:
    real, dry = notes(), notes()
    settings: dict[str, Any] = {"max_epochs": 5, "gradient_accumulation_steps": 2}
    schedule: dict[str, Any] = {"lr_scheduler": "linear", "warmup": 4}
    fit(make_trainer(callbacks=[real], **settings), **schedule)
    trainer = make_trainer(callbacks=[dry], **settings, dry_run=True)
    result = fit(trainer, **schedule)
    assert (result.step, result.epoch, result.samples_seen) == (1, 1, 8)
    assert result.stop_reason == "dry_run"
    assert dry.rates == real.rates[:1]  # the schedule is that of 20 steps
    assert trainer.run is not None
    assert trainer.run.planned_steps == 20
    assert (
        sum(loader.samples_per_epoch or 0 for loader in trainer.run.evaluation.loaders.values())
        == 4
    )
    expected = {"on_log", "on_epoch_end", "on_evaluation_end", "on_evaluation_batch_end"}
    assert expected <= dry.hooks


@pytest.mark.parametrize(("settings", "steps"), [({"dry_run": 3}, 3), ({"dry_run": 99}, 8)])
def test_several_steps_but_no_second_epoch(settings: dict[str, Any], steps: int) -> None:
    assert fit(make_trainer(max_epochs=5, **settings)).step == steps
    assert fit(make_trainer(max_steps=2, **settings)).stop_reason == "max_steps"
    assert fit(make_trainer(max_epochs=1, **settings)).stop_reason == "dry_run"


def test_what_comes_seldom_comes_too() -> None:
    seen = notes()
    often = [Evaluation(["accuracy"], every_n_steps=1000)]
    fit(make_trainer(callbacks=[seen, *often], max_steps=5000, log_every_n_steps=500, dry_run=True))
    assert {"on_log", "on_evaluation_end"} <= seen.hooks


def writers(folder: Path) -> list[Callback]:
    """Return what writes, into the output directory and elsewhere."""
    return [
        Summary(),
        JSONLLogger(),
        TensorBoardLogger(folder / "boards"),
        Profiler(wait=0, warmup=1, active=1, directory=folder / "profile"),
        Predictions(folder / "said-{step}.csv"),
        WandbLogger(directory=folder / "wandb", mode="offline"),
        Checkpoint(every_n_steps=1000, keep_best=("eval/loss", "min")),
        EarlyStopping("eval/loss", patience=1, mode="min"),
    ]


def dry(folder: Path, **settings: Any) -> Any:
    trainer = make_trainer(
        callbacks=writers(folder), output_dir=folder / "runs" / "first", dry_run=True, **settings
    )
    result = fit(trainer)
    trainer.save_model(folder / "model")
    return trainer, result


@pytest.mark.e2e  # imports all that writes
@pytest.mark.filterwarnings("ignore")  # of the profiler, which has too little to do
def test_all_is_written_and_goes_with_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, result = dry(tmp_path)
    said = capsys.readouterr().out
    assert "trainkit: dry run: 1 step of training, 1 batch of each evaluation; nothing" in said
    assert "dry run: the model goes to" in said
    found = [*tmp_path.iterdir()]
    assert len(found) == 1, found
    scratch = found[0]
    names = [Path(name).name for name in all_files(scratch)]
    assert {"metrics.jsonl", "said-1.csv", "model.safetensors"} <= {*names}
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert result.checkpoint.is_dir()
    rows = list(csv.reader(next(scratch.rglob("said-1.csv")).open()))
    assert len(rows) == 1 + 4
    assert result.output_dir == trainer.run.output_dir != tmp_path / "runs" / "first"


PROGRAM = """
import sys
from pathlib import Path
from tests.helpers.toys import fit, make_trainer
from trainkit.callbacks import Checkpoint, JSONLLogger
place = Path(sys.argv[1])
for _ in range(2):
    trainer = make_trainer(
        callbacks=[Checkpoint(), JSONLLogger()], output_dir=place / "a" / "b", dry_run=True
    )
    result = fit(trainer, resume="auto")
    trainer.save_model(place / "model")
    print(sorted(path.name for path in place.iterdir()), result.checkpoint.is_dir())
raise ValueError("enough")
"""


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_nothing_is_left_of_a_program_that_fails(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("'mine'") == 2
    assert done.stdout.count("It begins anew: `resume='auto'` is not tried.") == 2
    assert all_files(tmp_path) == ["mine"]


def test_a_real_run_stays_as_it_is(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": tmp_path / "run", "max_epochs": 2}
    fit(make_trainer(callbacks=[Checkpoint(), JSONLLogger()], **settings))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trainer = make_trainer(callbacks=[Checkpoint(), JSONLLogger()], **settings, dry_run=True)
    fit(trainer, resume="must")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before.items() <= after.items()
    assert all(".trainkit-dry-run-" in str(path) for path in after.keys() - before.keys())


def test_evaluate_and_predict_are_short_too(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, model = make_trainer(dry_run=2), toy_model()
    loader = toy_loaders()[1]
    assert len(trainer.predict(model, loader)) == 8
    inputs, targets = loader.dataset[:8]
    loss = nn.functional.cross_entropy(model.cpu()(inputs), targets).item()
    found = trainer.evaluate(model, loader, loss_fn=nn.CrossEntropyLoss())
    assert found["eval/loss"] == pytest.approx(loss)
    assert capsys.readouterr().out.count("dry run: the first batches of the loader, 2.") == 2


def test_the_best_of_a_dry_run_is_its_own(tmp_path: Path) -> None:
    def values(seed: int, **settings: Any) -> set[float]:
        best = Checkpoint(keep_best=("eval/loss", "min"))
        trainer = make_trainer(callbacks=[best], output_dir=tmp_path, **settings)
        result = fit(trainer, model=(model := toy_model(seed)))
        assert result.best_value is not None
        again = trainer.evaluate(model, toy_loaders()[1], checkpoint="best")
        return {result.best_value, again["eval/loss"]}

    assert len(values(0)) == 1
    assert len(values(1, dry_run=True)) == 1  # and not that of the run in this folder


def test_what_the_real_run_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the trainer has none"):
        fit(make_trainer(callbacks=[Checkpoint()], dry_run=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="A dry run writes into a folder in"):
        fit(make_trainer(output_dir=tmp_path / "file" / "run", dry_run=True))
    with pytest.raises(ConfigError, match="warmup"):
        fit(make_trainer(dry_run=True, max_epochs=2), lr_scheduler="linear", warmup=99)


def test_a_finder_tries_as_many_rates_as_there_are_steps() -> None:
    finder = LRFinder()
    assert fit(make_trainer(callbacks=[finder], dry_run=3, max_epochs=2)).step == 3
    assert len(finder.rates) == 3


def on_rank(rank: int, folder: Path) -> Any:
    trainer, result = dry(folder)
    found = [torch.save, result.step, result.samples_seen, str(result.checkpoint), result.metrics]
    trainer.close()
    return found[1:]


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_two_processes(tmp_path: Path) -> None:
    one, other = run_ranks(2, on_rank, tmp_path)
    assert one == other
    assert one[:2] == [1, 8]
    assert "model" not in [path.name for path in tmp_path.iterdir()]
