"""Training workloads: a model, data and settings, the same for every peer.

All peers see the same samples in the same order: the data were made in random order, and the loader
goes through them as they stand (`shuffle=False`), because no two frameworks shuffle alike.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.compare import tasks
from benchmarks.compare.meter import Meter
from benchmarks.compare.workload import Outcome, Workload

__all__ = ["LOG_EVERY", "Parts", "Training"]

LOG_EVERY = 50
"""Updates between two logs, where there are any."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What is trained, made anew for each run."""

    model: nn.Module
    dataset: Dataset[Any]
    loader: DataLoader[Any]
    make_optimizer: Callable[..., Optimizer]  # of parameters
    loss_fn: nn.Module | None  # None: batches are keyword arguments, the model returns its loss
    folder: Path  # for what is written

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a batch."""
        if self.loss_fn is None:
            return model(**batch).loss
        inputs, targets = batch
        return self.loss_fn(model(inputs), targets)


@dataclass(frozen=True, kw_only=True)
class Training(Workload):
    """Trains for some epochs, the first of which is warm-up.

    Args:
        task: Of `tasks.py`: the model and the data.
        batch_size: Samples of a micro-batch of one process.
        steps: Updates of an epoch.
        epochs: Passes over the data.
        accumulation: Micro-batches for each update, of each process.
        max_norm: To which the gradient is clipped; None: not.
        bf16: Whether the forward runs under bf16 autocast.
        extras: A progress bar, TensorBoard every `LOG_EVERY` steps, a checkpoint each epoch.
        workers: Of the loader.
    """

    kind: ClassVar[str] = "training"
    unit: ClassVar[str] = "step"

    task: Literal["mlp", "gpt2", "samples", "batches"] = "mlp"
    batch_size: int = 32
    steps: int = 512
    epochs: int = 2
    accumulation: int = 1
    max_norm: float | None = None
    bf16: bool = False
    extras: bool = False
    workers: int = 0

    def make(self, folder: Path) -> Parts:
        """Return a model and data that depend on nothing but the settings."""
        torch.manual_seed(0)
        length = self.steps * self.accumulation * self.batch_size * self.processes
        model, dataset = tasks.TASKS[self.task](length)
        loader = DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
        )
        generates = self.task == "gpt2"
        return Parts(
            model=model,
            dataset=dataset,
            loader=loader,
            make_optimizer=partial(AdamW, lr=1e-4) if generates else partial(SGD, lr=1e-3),
            loss_fn=None if generates else nn.MSELoss(),
            folder=folder,
        )

    @override
    def measure(self, work: Callable[..., Any], meter: Meter) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            parts = self.make(Path(folder))
            stamping = register_optimizer_step_post_hook(meter.stamp)
            try:
                work(self, parts)
            finally:
                stamping.remove()
        updates = self.steps * self.epochs
        if len(meter.stamps) != updates:
            raise RuntimeError(f"{len(meter.stamps)} updates were made instead of {updates}.")
        first, last = meter.stamps[self.steps - 1], meter.stamps[-1]
        measured = updates - self.steps
        return Outcome(
            seconds=(last.seconds - first.seconds) / measured,
            calls=(last.calls - first.calls) / measured,
            syncs=(last.syncs - first.syncs) / measured,
            product=_flat(parts.model),
        )


def _flat(model: nn.Module) -> Tensor:
    """Return all parameters in one vector; those that are sharded are put together."""
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([parameter.detach().reshape(-1) for parameter in whole])
