"""Evaluation workloads: the accuracy of a classifier over a data set that does not divide evenly.

Every peer says what share of the samples is right; nothing else counts. The length is no multiple
of processes or batches: who repeats samples to fill up, or guesses what to leave out, is not exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.compare.meter import Meter
from benchmarks.compare.workload import Outcome, Workload

__all__ = ["CLASSES", "Evaluation", "EvaluationParts", "Gathering"]

CLASSES, WIDTH = 10, 16


@dataclass(frozen=True, kw_only=True)
class EvaluationParts:
    """What is evaluated."""

    model: nn.Module
    dataset: TensorDataset
    loader: DataLoader[Any]


@cache
def _data(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(length, WIDTH, generator=generator)
    return inputs, torch.randint(CLASSES, (length,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Workload):
    """Evaluates with what the peer has for it.

    A peer's function takes the workload and the parts, and returns a function that makes one
    evaluation and returns the accuracy.

    Args:
        length: Samples.
        batch_size: Of one process.
    """

    kind: ClassVar[str] = "evaluation"
    unit: ClassVar[str] = "evaluation"

    length: int = 20_003
    batch_size: int = 64

    def make(self) -> EvaluationParts:
        """Return a model and data that depend on nothing but the settings."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        dataset = TensorDataset(*_data(self.length))
        return EvaluationParts(
            model=model, dataset=dataset, loader=DataLoader(dataset, batch_size=self.batch_size)
        )

    @override
    def measure(self, work: Callable[..., Any], meter: Meter) -> Outcome:
        evaluate: Callable[[], float] = work(self, self.make())
        evaluate()  # afterwards, all processes start together
        meter.stamp()
        accuracy = evaluate()
        meter.stamp()
        first, last = meter.stamps[-2:]
        return Outcome(
            seconds=last.seconds - first.seconds,
            calls=last.calls - first.calls,
            syncs=last.syncs - first.syncs,
            product=torch.tensor([accuracy], dtype=torch.float64),
        )


@dataclass(frozen=True, kw_only=True)
class Gathering(Evaluation):
    """Evaluates in a loop of one's own, which gathers the classes of every batch."""

    kind: ClassVar[str] = "gathering"
