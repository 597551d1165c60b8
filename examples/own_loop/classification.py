"""The classification loop with an `Accelerator`: the same on one process and on many.

    python examples/own_loop/classification.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/classification.py

With the first line of the imports changed it is a script of Hugging Face Accelerate.
"""

import argparse

import torch
from data import SAMPLES, checksum, make_data, make_model
from torch import nn
from torch.utils.data import DataLoader

from trainkit import Accelerator

EPOCHS = 3
BATCH = 20


def main() -> None:
    """Train, evaluate on all processes, and print the weights' checksum and the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", help="a file for the weights")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = make_data(SAMPLES, seed=1)
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(data, BATCH, shuffle=True, drop_last=True, generator=generator)
    held_out = DataLoader(make_data(101, seed=2), BATCH)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
    for _ in range(EPOCHS):
        for features, classes in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(features), classes))
            optimizer.step()
    if arguments.save is not None:
        accelerator.save(accelerator.unwrap_model(model).state_dict(), arguments.save)
    accelerator.print(f"weights {checksum(accelerator.unwrap_model(model))}")

    model.eval()
    right, seen = 0, 0
    for features, classes in held_out:
        with torch.no_grad():
            predictions = model(features).argmax(-1)
        predictions, classes = accelerator.gather_for_metrics((predictions, classes))
        right += int((predictions == classes).sum())
        seen += len(classes)
    accelerator.print(f"accuracy {right / seen:.4f} over {seen} samples")


if __name__ == "__main__":
    main()
