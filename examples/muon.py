"""Two optimizers on one loss: Muon for the matrices of the hidden layers, AdamW for all else.

    python examples/muon.py
    trainkit launch --num_processes 2 examples/muon.py

The step returns one loss, so both make one update of it: one clipping, one loss scale, and the
gradients are reduced while backward goes on. Each has a learning-rate schedule of its own. Under
FSDP Muon's update is that of the whole matrix too, up to the bfloat16 that torch computes it in.
Prints what AdamW alone comes to as well.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils.data import DataLoader, TensorDataset, random_split
from typing_extensions import override

from trainkit import Trainer
from trainkit.callbacks import Evaluation, LRMonitor


class Split(Trainer):
    """Trains the matrices of hidden layers by Muon, and the rest by AdamW."""

    @override
    def configure_optimizers(self, model: nn.Module, optimizers: Any) -> Mapping[str, Optimizer]:
        named = dict(model.named_parameters())
        hidden = {name for name in named if name.startswith("hidden.") and named[name].ndim == 2}
        return {
            "muon": Muon([named[name] for name in sorted(hidden)], lr=0.02, weight_decay=0.01),
            "adamw": AdamW([p for name, p in named.items() if name not in hidden], lr=3e-3),
        }


def make_model(width: int = 64, layers: int = 3) -> nn.Module:
    """Return a network of `layers` hidden layers."""
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    parts = {"first": nn.Linear(64, width), "hidden": nn.Sequential(*hidden)}
    model = nn.Sequential()
    for name, part in (parts | {"last": nn.Linear(width, 10)}).items():
        model.add_module(name, part)
    return model


def train(cls: type[Trainer], epochs: int, **optimizer: Any) -> tuple[float, Trainer]:
    """Return the accuracy on held-out digits, and the trainer."""
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    held_out, training = random_split(data, [0.3, 0.7], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    trainer = cls(
        max_epochs=epochs,
        split_batches=True,  # the same global batch on any number of processes
        callbacks=[Evaluation(["accuracy"]), LRMonitor()],
    )
    result = trainer.fit(
        make_model(),
        (DataLoader(training, 64, shuffle=True), DataLoader(held_out, 256)),
        lr_scheduler="cosine",  # one for each optimizer
        loss_fn=nn.CrossEntropyLoss(),
        **optimizer,
    )
    return result.metrics["eval/accuracy"], trainer


def main() -> None:
    """Train both ways, and print what comes of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data (default: 5)")
    epochs = parser.parse_args().epochs
    alone, _ = train(Trainer, epochs, optimizer=partial(AdamW, lr=3e-3))
    split, trainer = train(Split, epochs)
    trainer.processes.print(f"accuracy: {split:.4f} with Muon, {alone:.4f} with AdamW alone")
    trainer.close()


if __name__ == "__main__":
    main()
