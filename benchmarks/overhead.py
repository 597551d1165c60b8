"""What the loop costs: trainkit against a raw loop, in one process, interleaved.

Counts Python and C calls per step, which do not depend on the machine, and times a step as a ratio
to the raw loop within the same round. Run it by `make bench`.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainkit import Callback, Trainer
from trainkit.callbacks import LRMonitor, ProgressBar, TensorBoardLogger

SAMPLES, WIDTH = 2000, 8


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set that can only hand out one sample at a time."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def make_parts(kind: str, batch_size: int) -> tuple[nn.Module, DataLoader[Any]]:
    """Return a tiny model and a shuffled loader; both depend on nothing but the arguments."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, 1)
    data = TensorDataset(inputs, targets) if kind == "tensors" else Rows(inputs, targets)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, DataLoader(data, batch_size=batch_size, shuffle=True)


def raw(kind: str, batch_size: int) -> int:
    """Train one epoch by hand; return the steps."""
    model, loader = make_parts(kind, batch_size)
    optimizer = SGD(model.parameters(), lr=1e-3)
    loss_fn = nn.MSELoss()
    model.train()
    steps = 0
    for inputs, targets in loader:
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
    return steps


def ours(kind: str, batch_size: int, make_callbacks: Callable[[], list[Callback]]) -> int:
    """Train the same epoch by trainkit; return the steps."""
    model, loader = make_parts(kind, batch_size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(max_epochs=1, callbacks=make_callbacks(), output_dir=folder)
        result = trainer.fit(model, loader, optimizer=partial(SGD, lr=1e-3), loss_fn=nn.MSELoss())
    return result.step


def count_calls(run: Callable[[], int]) -> float:
    """Return the Python and C calls for each step, of all threads."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        steps = run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return count / steps


def seconds(run: Callable[[], int]) -> float:
    """Return the wall time of a step."""
    start = time.perf_counter()
    steps = run()
    return (time.perf_counter() - start) / steps


def loaded() -> list[Callback]:
    """Return the callbacks of an ordinary run."""
    return [ProgressBar(), TensorBoardLogger(), LRMonitor()]


def measure(kind: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Measure every variant on one kind of data set."""
    variants: dict[str, Callable[[], int]] = {
        "raw": partial(raw, kind, batch_size),
        "trainkit": partial(ours, kind, batch_size, list),
        "trainkit + callbacks": partial(ours, kind, batch_size, loaded),
    }
    for variant in variants.values():
        variant()  # warm-up
    calls = {name: count_calls(variant) for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            times[name].append(seconds(variant))
    return {
        name: {
            "calls": round(calls[name], 1),
            "over raw": round(calls[name] - calls["raw"], 1),
            "microseconds": round(1e6 * statistics.median(times[name]), 1),
            "ratio": round(
                statistics.median(
                    ours / theirs for ours, theirs in zip(times[name], times["raw"], strict=True)
                ),
                3,
            ),
        }
        for name in variants
    }


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    print(f"{'data set':12} {'batch':>5}  {'':22} {'calls/step':>10} {'over raw':>9} {'time':>6}")
    for kind, batch_size in (("tensors", 1), ("tensors", 32), ("rows", 1), ("rows", 32)):
        results[f"{kind}, batch {batch_size}"] = table = measure(kind, batch_size, arguments.rounds)
        for name, row in table.items():
            print(
                f"{kind:12} {batch_size:5}  {name:22} {row['calls']:10} {row['over raw']:9} "
                f"{row['ratio']:6.2f}"
            )
    if arguments.output:
        facts = {"python": platform.python_version(), "torch": torch.__version__}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
