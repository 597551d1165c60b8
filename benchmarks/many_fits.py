"""What fits leave behind in a process that makes many of them, as a sweep does.

Run it in the root of the repository, on Linux:

    OMP_NUM_THREADS=1 python -m benchmarks.many_fits

Each fit trains a new model of 280,000 parameters with a new `Trainer`, logs, evaluates and
saves; then its objects are given up. After some fits that warm up, nothing that is counted may
grow: threads, file descriptors, process groups, child processes, modules of earlier fits that are
still there. Objects and resident memory may move by little. Exits with 1 where something grows.
"""

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from trainkit import Callback, Run, StepResult, Trainer
from trainkit.callbacks import (
    EMA,
    Checkpoint,
    Evaluation,
    JSONLLogger,
    TensorBoardLogger,
    Throughput,
)
from trainkit.strategies import FSDP

FITS, WARM = 50, 5
MOST_OBJECTS = 5.0  # a fit, of Python
MOST_KIB = 150.0  # a fit, of resident memory; a model and its optimizer have 3,400
_MMAP_THRESHOLD = -3  # of mallopt
COUNTED = ("threads", "descriptors", "groups", "children", "modules")

Figures = dict[str, int]


class Breaks(Callback):
    """Ends each fit by an error."""

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 3:
            raise ZeroDivisionError


def _callbacks() -> list[Callback]:
    return [Evaluation(["accuracy"]), JSONLLogger(), Checkpoint(background=True)]


def _all_callbacks() -> list[Callback]:
    return [*_callbacks(), TensorBoardLogger(), Throughput(), EMA(0.9)]


def _failing_callbacks() -> list[Callback]:
    return [*_callbacks(), Breaks()]


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "workers": (1, {"workers": 2}),
    "more callbacks": (1, {"callbacks": _all_callbacks}),
    "failed": (1, {"callbacks": _failing_callbacks}),
    "compiled": (1, {"compile": {"backend": "eager"}}),
    "ddp": (2, {}),
    "fsdp": (2, {"strategy": lambda: "fsdp"}),
    "fsdp, replicas": (2, {"strategy": lambda: FSDP(replicas=2)}),
}
"""The number of processes, and what is not as usual."""


def fit(
    callbacks: Callable[[], list[Callback]] = _callbacks,
    workers: int = 0,
    width: int = 512,
    strategy: Callable[[], Any] = lambda: "auto",
    **settings: Any,
) -> "weakref.ref[nn.Module]":
    """Train a new model, and return a reference that does not keep it."""
    inputs = torch.randn(32, 32)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    loader = partial(DataLoader, data, batch_size=8, num_workers=workers)
    layers = [nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 2))
    with tempfile.TemporaryDirectory() as own:
        made: dict[str, Any] = {"callbacks": callbacks(), "strategy": strategy()}
        trainer = Trainer(max_epochs=1, **made, **settings)
        trainer.output_dir = Path(trainer.processes.processes.broadcast_object(own))
        with suppress(ZeroDivisionError):
            trainer.fit(
                model,
                (loader(shuffle=True), loader()),
                optimizer=partial(torch.optim.AdamW, lr=1e-3),
                loss_fn=nn.CrossEntropyLoss(),
            )
        trainer.processes.wait_for_everyone()  # before the folder of process 0 goes
    return weakref.ref(model)


def left(modules: "list[weakref.ref[nn.Module]]") -> Figures:
    """Return what there is of each kind in this process."""
    gc.collect()
    task, pages = Path("/proc/self/task"), Path("/proc/self/statm").read_text().split()[1]
    return {
        "threads": len(os.listdir(task)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "groups": len(distributed_c10d._world.pg_map),
        "children": sum(len(own.read_text().split()) for own in task.glob("*/children")),
        "modules": sum(module() is not None for module in modules),
        "objects": len(gc.get_objects()),
        "KiB": int(pages) * os.sysconf("SC_PAGESIZE") >> 10,
    }


def measure(rank: int, fits: int, warm: int, settings: dict[str, Any]) -> list[Figures]:
    """Return what there is after the fits that warm up, and after all."""
    found, modules = [], []
    sys.path.append(tempfile.gettempdir())  # a folder that changes, as that of a notebook
    for number in range(1, fits + 1):
        modules.append(fit(**settings))
        if number in (warm, fits):
            time.sleep(0.2)  # threads of torch that have ended may still be counted
            found.append(left(modules))
    return found


def check(before: Figures, after: Figures, fits: int) -> list[str]:
    """Return what grew over some fits."""
    more = [name for name in COUNTED if after[name] > before[name]]
    grown = [f"{name}: {before[name]} -> {after[name]}" for name in more]
    for name, most in (("objects", MOST_OBJECTS), ("KiB", MOST_KIB)):
        a_fit = (after[name] - before[name]) / fits
        if a_fit > most:
            grown.append(f"{name}: {a_fit:.1f} a fit, at most {most}")
    return grown


def main() -> None:
    """Print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits", type=int, default=FITS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # What a freed tensor had goes back to the system at once: else malloc keeps some 70 MB of what
    # the first twenty fits have freed, and the figures are of that.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    results: dict[str, Any] = {}
    bad = False
    for kind in options.kinds:
        size, settings = KINDS[kind]
        results[kind] = run_ranks(size, measure, options.fits, WARM, settings, timeout=3600)
        for rank, (before, after) in enumerate(results[kind]):
            grown = check(before, after, options.fits - WARM)
            bad = bad or bool(grown)
            cells = [f"{name} {before[name]} -> {after[name]}" for name in before]
            print(f"{kind}, process {rank}: {', '.join(cells)}", flush=True)
            for what in grown:
                print(f"  GROWS: {what}", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(bad)


if __name__ == "__main__":
    main()
