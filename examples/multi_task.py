"""Two tasks, two loaders, one trunk: few digits with labels, and many without.

    python examples/multi_task.py
    trainkit launch --num_processes 2 examples/multi_task.py --output-dir runs/digits

The one head names the digit, the other draws it again from a noisy picture. Each step has a batch
of both loaders; the epoch ends with the longer one, while the labelled digits come again, shuffled
anew. `training_step` returns a loss for each loader, and each counts by its own samples, on one
process and on several, though the loaders end with batches of different sizes.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from trainkit import Combined, Trainer
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger, ProgressBar, Summary

LABELLED, HELD_OUT = 100, 500  # of 1,797 digits


class Digits(nn.Module):
    """What is seen in a picture of 64 pixels, and a head for each task."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU())
        self.heads = nn.ModuleDict({"named": nn.Linear(64, 10), "drawn": nn.Linear(64, 64)})

    @override
    def forward(self, pictures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the head of each task says of its pictures."""
        return {task: self.heads[task](self.trunk(each)) for task, each in pictures.items()}


class MultiTask(Trainer):
    """Trains both tasks in each step; names digits in an evaluation."""

    drawing_weight = 2.0

    @override
    def training_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        (pictures, digits), (whole,) = batch["named"], batch["drawn"]
        noisy = whole * (torch.rand_like(whole) < 0.7)
        outputs = model({"named": pictures, "drawn": noisy})
        return {
            "named": cross_entropy(outputs["named"], digits),
            "drawn": self.drawing_weight * mse_loss(outputs["drawn"], whole),
        }

    @override
    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        pictures, digits = batch
        scores = model({"named": pictures})["named"]
        return {"scores": scores, "references": digits, "loss": cross_entropy(scores, digits)}


def make_loaders() -> dict[str, Any]:
    """Return the loaders of both tasks, and that of the held-out digits."""
    table = load_digits()
    order = torch.randperm(len(table.data), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(table.data, dtype=torch.float32)[order] / 16
    digits = torch.tensor(table.target)[order]
    seen = len(pictures) - HELD_OUT
    named = TensorDataset(pictures[:LABELLED], digits[:LABELLED])
    held_out = TensorDataset(pictures[seen:], digits[seen:])
    return {
        "train": Combined(
            {
                "named": DataLoader(named, batch_size=16, shuffle=True),
                "drawn": DataLoader(TensorDataset(pictures[:seen]), batch_size=64, shuffle=True),
            },
            "max_cycle",
        ),
        "eval": DataLoader(held_out, batch_size=250),
    }


def main() -> None:
    """Train, and print how many of the held-out digits are named right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/multi_task"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--drawing-weight", type=float, default=MultiTask.drawing_weight)
    parser.add_argument("--tiny", action="store_true", help="two epochs, to see that it runs")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    trainer = MultiTask(
        max_epochs=2 if arguments.tiny else arguments.epochs,
        split_batches=True,
        output_dir=arguments.output_dir,
        callbacks=[
            ProgressBar(),
            Summary(),
            Evaluation(["accuracy"], every_n_epochs=5),
            Checkpoint(every_n_epochs=10),
            JSONLLogger(),
        ],
    )
    trainer.drawing_weight = arguments.drawing_weight
    result = trainer.fit(
        Digits(),
        make_loaders(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        lr_scheduler="cosine",
        resume="auto",
    )
    trainer.processes.print(f"accuracy on held-out digits: {result.metrics['eval/accuracy']:.4f}")
    trainer.close()


if __name__ == "__main__":
    main()
