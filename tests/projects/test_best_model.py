"""The best model as a new user wants it: stop when it gets worse, keep the best, ship that."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import CheckpointError, Trainer, load_checkpoint_in_model
from trainkit.callbacks import Checkpoint, EarlyStopping, Evaluation
from trainkit.cli.main import main


def make_data(samples: int, seed: int, noise: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 12, generator=generator)
    wrong = torch.rand(samples, generator=generator) < noise
    return TensorDataset(inputs, ((inputs[:, 0] > 0) ^ wrong).long())


TRAIN, HELD_OUT = make_data(48, seed=1, noise=0.25), make_data(37, seed=2)  # too few, too noisy


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


def loss_of(model: nn.Module) -> float:
    """Return the loss on what was held out, by hand."""
    inputs, targets = HELD_OUT.tensors
    with torch.no_grad():
        return cross_entropy(model.eval()(inputs), targets).item()


def overfit(rank: int, folder: Path, strategy: Any, resume: str | Path | None = None) -> Any:
    trainer = Trainer(
        max_epochs=60,
        strategy=strategy,
        split_batches=True,
        output_dir=folder,
        callbacks=[
            Evaluation(["accuracy"]),
            EarlyStopping("eval/loss", patience=3, mode="min"),
            Checkpoint(every_n_epochs=2, keep_best=("eval/loss", "min", 2), weights_only=True),
        ],
    )
    model, held_out = make_model(), DataLoader(HELD_OUT, 8)
    result = trainer.fit(
        model,
        (DataLoader(TRAIN, 16, shuffle=True), held_out),
        optimizer=partial(torch.optim.AdamW, lr=0.03),
        loss_fn=nn.CrossEntropyLoss(),
        restore_best=True,
        resume=resume,
    )
    present = trainer.evaluate(model, held_out)  # the model holds the best
    last = trainer.evaluate(model, held_out, metrics=["accuracy"], checkpoint="last")
    tested = trainer.test(model, {"held": held_out}, checkpoint="best")
    scores = trainer.predict(model, held_out, checkpoint=result.best_checkpoint)
    trainer.save_model(folder / "export", checkpoint="best")
    trainer.save_model(folder / "last", checkpoint="last")
    return {
        "steps": (result.step, result.best_step),
        "best": result.best_value,
        "last": (result.metrics, last),
        "present": (present, trainer.evaluate(model, held_out)),
        "tested": tested,
        "scores": cross_entropy(scores, HELD_OUT.tensors[1]).item(),
        "reason": result.stop_reason,
        "kind": result.best_checkpoint and result.best_checkpoint.parent.name,
    }


def check(found: dict[str, Any], folder: Path) -> None:
    step, best_step = found["steps"]
    assert found["reason"] == "eval/loss has not improved for 3 evaluations"
    assert best_step == step - 3 * 3  # three epochs of three steps were no better
    assert found["kind"] == "weights"
    assert found["present"] == ({"eval/loss": found["best"]},) * 2
    assert found["last"][0] == found["last"][1]
    assert found["last"][0]["eval/loss"] > found["best"]
    assert found["tested"] == {"test/held/loss": found["best"]}
    assert found["scores"] == pytest.approx(found["best"], rel=1e-5)
    for name, value in (("export", found["best"]), ("last", found["last"][0]["eval/loss"])):
        model = make_model()
        load_checkpoint_in_model(model, folder / name, strict=True)
        assert loss_of(model) == pytest.approx(value, rel=1e-5)


STRATEGIES = [("single", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.mark.parametrize(("strategy", "size"), with_few([("single", 1)], STRATEGIES))
def test_the_best_model_is_kept_restored_tested_and_exported(
    strategy: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for found in run_ranks(size, overfit, tmp_path, strategy):
        check(found, tmp_path)
    step, best_step = found["steps"]
    best = tmp_path / "weights" / f"step-{best_step:08d}"
    about = json.loads((best / "manifest.json").read_text())
    assert not [name for name in about["files"] if not name.startswith("model")]

    # Another program, on one process, finds it by its name.
    other = Trainer(max_steps=1, output_dir=tmp_path, callbacks=[])
    loader, loss_fn = DataLoader(HELD_OUT, 8), nn.CrossEntropyLoss()
    again = other.evaluate(make_model(), loader, loss_fn=loss_fn, checkpoint="best")
    assert again["eval/loss"] == pytest.approx(found["best"], rel=1e-5)

    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[5:7] == ["eval/loss", "eval/accuracy"]
    marks = {tuple(line.split("step-")[1].split(maxsplit=1)) for line in lines[1:]}
    assert {(f"{best_step:08d}", "best"), (f"{step:08d}", "last")} <= marks
    assert [mark[1:] for mark in marks].count(("best 2",)) == 1
    assert f"{found['best']:.6g}" in next(line for line in lines if line.endswith("  best"))

    # Ended as it is, there is nothing left to do; and nothing goes on from weights alone.
    for again in run_ranks(size, overfit, tmp_path, strategy, "must"):
        check(again, tmp_path)
        assert again["steps"] == found["steps"]
    with pytest.raises(CheckpointError, match="holds the weights alone, without optimizer"):
        overfit(0, tmp_path, "single", best)
