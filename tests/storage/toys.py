"""A training into a storage, on a machine of its own: a forked process with a folder of its own."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Callback, Run, Trainer
from trainkit.callbacks import Checkpoint, JSONLLogger
from trainkit.types import StepResult

STEPS = 6


class At(Callback):
    """Calls something after a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self._step, self._action = step, action

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == self._step and run.is_main_process:
            self._action()


def train(
    rank: int,
    output_dir: str,
    machine: Path,
    *callbacks: Callback,
    resume: str | None = "auto",
    keep_last: int = 1,
    new_run: bool = False,
    strategy: Literal["auto", "fsdp"] = "auto",
) -> tuple[int | None, list[torch.Tensor]]:
    """Train; return from where it went on, and the weights."""
    os.environ["TRAINKIT_STORAGE_DIR"] = str(machine)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    trainer = Trainer(
        max_steps=STEPS,
        output_dir=output_dir,
        new_run=new_run,
        strategy=strategy,
        log_every_n_steps=1,
        callbacks=[Checkpoint(every_n_steps=2, keep_last=keep_last), JSONLLogger(), *callbacks],
    )
    trainer.fit(
        model,
        DataLoader(data, batch_size=4, shuffle=True),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
    )
    assert trainer.run is not None
    weights = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return trainer.run.checkpoints.resumed_from, [each.detach() for each in weights]


def start(*args: Any, prints: Path, **kwargs: Any) -> tuple[BaseProcess, Any]:
    """Start a training in a process that waits for the event that is returned too."""
    context = multiprocessing.get_context("fork")
    gate = context.Event()

    def main() -> None:
        gate.wait()
        with prints.open("w", buffering=1) as file:
            sys.stdout = sys.stderr = file
            train(0, *args, **kwargs)

    process = context.Process(target=main)
    process.start()
    return process, gate
