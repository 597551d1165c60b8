"""Distillation as a new user writes it: a frozen teacher, a soft loss, early stopping on it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from trainkit import LRSchedule, StepOutput, Trainer
from trainkit.callbacks import Checkpoint, EarlyStopping, Evaluation, JSONLLogger

TEMPERATURE = 2.0
HELD_OUT = 45  # the last global batch is ragged on two processes


def make_data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def make_teacher() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Distil(Trainer):
    """Trains a student on the soft answers of a teacher and on the labels."""

    def __init__(self, teacher: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self.teacher = teacher.requires_grad_(False).eval()

    def soft_loss(self, outputs: Tensor, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            answers = self.teacher.to(inputs.device)(inputs)
            wanted = functional.softmax(answers / TEMPERATURE, dim=1)
        given = functional.log_softmax(outputs / TEMPERATURE, dim=1)
        return functional.kl_div(given, wanted, reduction="batchmean") * TEMPERATURE**2

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        assert self.run is not None
        inputs, targets = batch
        outputs = model(inputs)
        soft, hard = self.soft_loss(outputs, inputs), functional.cross_entropy(outputs, targets)
        self.run.log({"soft": soft, "hard": hard}, weight=len(inputs))
        return StepOutput(0.8 * soft + 0.2 * hard)

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        assert self.run is not None
        inputs, targets = batch
        outputs = model(inputs)
        self.run.log({"soft": self.soft_loss(outputs, inputs)})
        agreed = outputs.argmax(1) == self.teacher(inputs).argmax(1)
        self.run.log({"agreement": agreed.float().mean()})
        return {"predictions": outputs.argmax(1), "references": targets}


def plateau(optimizer: Any) -> LRSchedule:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.3, patience=0, threshold=0.01, threshold_mode="abs"
    )
    return LRSchedule(scheduler, metric="eval/soft")


def distil(rank: int, folder: Path) -> dict[str, Any]:
    teacher = make_teacher()
    trainer = Distil(
        teacher,
        max_epochs=40,
        output_dir=folder,
        split_batches=True,
        log_every_n_steps=4,
        callbacks=[
            Evaluation(["accuracy"]),
            EarlyStopping("eval/soft", patience=2, mode="min", min_delta=0.01),
            Checkpoint(keep_best=("eval/soft", "min"), keep_last=1),
            JSONLLogger(),
        ],
    )
    torch.manual_seed(1)
    student = nn.Linear(6, 3)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    held_out = make_data(HELD_OUT, seed=2)
    result = trainer.fit(
        student,
        (DataLoader(make_data(96, seed=1), 16, shuffle=True), DataLoader(held_out, 8)),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        lr_scheduler=plateau,
    )
    assert all(torch.equal(before[name], v) for name, v in teacher.state_dict().items())
    with torch.no_grad():  # by hand
        outputs = student.cpu()(held_out.tensors[0])
        soft = trainer.soft_loss(outputs, held_out.tensors[0]).item()
        answers = teacher(held_out.tensors[0]).argmax(1)
        agreement = (outputs.argmax(1) == answers).double().mean().item()
    again = trainer.evaluate(student, DataLoader(held_out, 8))
    lines = (folder / "metrics.jsonl").read_text().splitlines() if rank == 0 else []
    return {
        "soft": (soft, result.metrics["eval/soft"], again["eval/soft"]),
        "agreement": (agreement, result.metrics["eval/agreement"], again["eval/agreement"]),
        "epochs": result.epoch,
        "stop": result.stop_reason,
        "rate": trainer.run.optimizer.param_groups[0]["lr"] if trainer.run is not None else None,
        "accuracy": result.metrics["eval/accuracy"],
        "weights": [p.tolist() for p in student.parameters()],
        "lines": [json.loads(line) for line in lines],
        "kept": sorted(path.name for path in (folder / "checkpoints").glob("step-*")),
    }


@pytest.mark.e2e
def test_distillation_stops_early_on_its_soft_loss(tmp_path: Path) -> None:
    (alone,) = run_ranks(1, distil, tmp_path / "1")
    both = run_ranks(2, distil, tmp_path / "2")
    for found in (alone, *both):
        assert found["stop"] == "eval/soft has not improved for 2 evaluations"
        assert 3 <= found["epochs"] < 40
        for by_hand, fitted, again in (found["soft"], found["agreement"]):
            assert fitted == pytest.approx(by_hand, rel=1e-5)
            assert again == pytest.approx(by_hand, rel=1e-5)
        for name in ("epochs", "kept", "rate", "accuracy"):
            assert found[name] == alone[name]
        assert found["soft"] == pytest.approx(alone["soft"], rel=1e-5)
        for weights, expected in zip(found["weights"], alone["weights"], strict=True):
            assert torch.tensor(weights) == pytest.approx(torch.tensor(expected), abs=1e-5)
    assert alone["rate"] < 0.5
    ones, twos = alone["lines"], both[0]["lines"]
    assert [set(line) for line in ones] == [set(line) for line in twos]
    train = [line for line in ones if line["kind"] == "train"]
    assert all({"loss", "soft", "hard"} <= set(line) for line in train)
    assert not any(name.startswith("eval") or name == "agreement" for ln in train for name in ln)
    for one, two in zip(ones, twos, strict=True):
        for name in set(one) - {"time/seconds", "kind"}:
            assert two[name] == pytest.approx(one[name], rel=1e-4), name
    evaluated = {line["step"]: line["eval/soft"] for line in ones if "eval/soft" in line}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert {int(name.rpartition("-")[2]) for name in alone["kept"]} == {best, max(evaluated)}
