"""Checkpoint workloads: a model and its AdamW, written until the disk has them, and read back."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from typing_extensions import override

from benchmarks.compare.meter import Meter
from benchmarks.compare.workload import Outcome, Workload

__all__ = ["Loading", "Saving", "StateParts"]

WIDTH = 2048


@dataclass(frozen=True, kw_only=True)
class StateParts:
    """What is saved."""

    model: nn.Module
    optimizer: AdamW
    folder: Path

    def tensors(self) -> list[Tensor]:
        """Return all that makes up the state, in one order."""
        states = self.optimizer.state_dict()["state"].values()
        return [*self.model.state_dict().values(), *(t for s in states for t in s.values())]


@dataclass(frozen=True, kw_only=True)
class Saving(Workload):
    """Saves; the time ends when everything would survive a power cut.

    A peer's function takes the workload and the parts, and returns a function that saves. What the
    peer does not sync itself is synced within the time. The loop by hand writes nothing but the
    bytes of the tensors, one after the other, into one file.

    Args:
        layers: Of about 4.2 million parameters each.
    """

    kind: ClassVar[str] = "saving"
    unit: ClassVar[str] = "save"

    layers: int = 6

    def make(self, folder: Path, *, trained: bool) -> StateParts:
        """Return a model and an AdamW that depend on nothing but the settings."""
        torch.manual_seed(0)
        layers = [nn.utils.skip_init(nn.Linear, WIDTH, WIDTH) for _ in range(self.layers)]
        model = nn.Sequential(*layers)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.0)
            parameter.data.view(-1)[::7] = number + 1.0
            parameter.grad = parameter.detach() if trained else torch.zeros_like(parameter)
        optimizer.step()  # makes its state
        optimizer.zero_grad()
        return StateParts(model=model, optimizer=optimizer, folder=folder)

    @override
    def measure(self, work: Callable[..., Any], meter: Meter) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            save = work(self, self.make(Path(folder), trained=True))
            os.sync()  # what is still to be written is not of this save
            meter.stamp()
            save()
            _sync_tree(folder)
            meter.stamp()
        return _between(meter, None)


@dataclass(frozen=True, kw_only=True)
class Loading(Saving):
    """Reads back what the peer has saved, into another model and optimizer.

    A peer's function takes the workload and the parts, and returns a function that loads what its
    function for `saving` has saved in `parts.folder`. The files are in the memory of the system.
    """

    kind: ClassVar[str] = "loading"
    unit: ClassVar[str] = "load"

    @override
    def measure(self, work: Callable[..., Any], meter: Meter) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="compare-") as folder:
            parts = self.make(Path(folder), trained=False)
            # The saving function of the same peer.
            work.__globals__["saving"](self, self.make(Path(folder), trained=True))()
            load = work(self, parts)
            meter.stamp()
            load()
            meter.stamp()
            product = torch.stack([t.double().sum() for t in parts.tensors()])
        return _between(meter, product)


def _between(meter: Meter, product: Tensor | None) -> Outcome:
    first, last = meter.stamps[-2:]
    return Outcome(
        seconds=last.seconds - first.seconds,
        calls=last.calls - first.calls,
        syncs=last.syncs - first.syncs,
        product=product,
    )


def _sync_tree(folder: str) -> None:
    """Wait until everything in a folder survives a power cut."""
    for place, _, names in os.walk(folder, topdown=False):
        for path in [*(os.path.join(place, name) for name in names), place]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
