"""What a probe asks of a framework, and the face that all frameworks have for it."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from benchmarks.behaviour import toys


class NotOffered(Exception):
    """The framework does not say that it does this; the message says how it is meant instead."""


NO_CHECK = "it has no such check"


@dataclass(frozen=True)
class Job:
    """One small training or evaluation; every process gets the same one.

    Attributes:
        samples: Number of samples; the model has a parameter for each.
        data: Given the number of samples, makes the data set.
        model: Given the number of samples, makes the model.
        batch: Samples of one process in a micro-batch.
        workers: Of each loader.
        sampler: Given the data set, makes a sampler, or with `batches` a batch sampler.
        accumulation: Micro-batches of one process in an update.
        collate: Makes a batch of samples, if torch's own does not.
        loss: `(outputs, targets) -> loss`.
        weigh: Over how many items the loss of these targets is a mean, if not samples.
        terms: The means that `loss` is the sum of, each with its count, for who takes them apart.
        schedule: Factor of the learning rate after so many updates.
        make_scheduler: Given the optimizer, makes a scheduler that is handed over as it is: nothing
            is said of when it moves.
        metric: What an evaluation computes; see `scored.metric`.
        optimizer: Given the parameters, makes the optimizer.
        overflow: Train in fp16 with a gradient scaler.
        folder: For checkpoints.
        save_every: Updates between two checkpoints; None: no checkpoints.
        keep: How many checkpoints stay; None: all.
        resume: A checkpoint, or "auto": the framework looks for it in `folder`.
        options: Switches of the framework, of the variant that is tried.
    """

    samples: int = 8
    data: Callable[[int], Any] = toys.Numbers
    model: Callable[[int], Any] = toys.Pick
    batch: int = 2
    shuffle: bool = False
    workers: int = 0
    sampler: Callable[[Any], Any] | None = None
    batches: bool = False
    epochs: int = 1
    accumulation: int = 1
    collate: Callable[[list[Any]], Any] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = toys.mean
    weigh: Callable[[Tensor], Tensor] | None = None
    terms: Callable[[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]] | None = None
    schedule: Callable[[int], float] | None = None
    make_scheduler: Callable[[Any], Any] | None = None
    metric: str = "auroc"
    optimizer: Callable[[Any], Any] = toys.Recorder
    overflow: bool = False
    folder: Path | None = None
    save_every: int | None = None
    keep: int | None = None
    resume: Path | str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Job":
        """Return this job with some things changed."""
        return replace(self, **changes)

    def loader(self, *, distributed: bool = False) -> DataLoader[Any]:
        """Return an ordinary loader.

        Args:
            distributed: With torch's `DistributedSampler`, for frameworks that leave it to users.
        """
        data = self.data(self.samples)
        if self.sampler is not None and self.batches:
            return DataLoader(data, batch_sampler=self.sampler(data), num_workers=self.workers)
        if isinstance(data, IterableDataset):
            return DataLoader(data, self.batch, num_workers=self.workers)
        sampler = self.sampler(data) if self.sampler is not None else None
        if sampler is None and distributed:
            sampler = DistributedSampler(data, shuffle=self.shuffle)
        shuffle = self.shuffle and sampler is None
        return DataLoader(
            data,
            self.batch,
            shuffle,
            sampler=sampler,
            num_workers=self.workers,
            collate_fn=self.collate,
        )

    def scheduler(self, optimizer: Any) -> Any:
        """Return the learning-rate scheduler, if there is one."""
        if self.make_scheduler is not None:
            return self.make_scheduler(optimizer)
        return None if self.schedule is None else LambdaLR(optimizer, self.schedule)

    def contrastive(self, gather: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return `toys.contrastive` over what `gather` returns, or torch's own with that option."""
        rows = toys.torch_gather if "torch_gather" in self.options else gather
        return lambda z, y: toys.contrastive(z, y, rows(z), gather(y))

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a scheduler."""
        return self.schedule is not None or self.make_scheduler is not None


@dataclass(frozen=True)
class Variant:
    """A switch of a framework, tried where its default is wrong.

    Attributes:
        label: As a user writes it.
        changes: Of the job.
    """

    label: str
    changes: dict[str, Any]


def option(label: str | None = None, **options: Any) -> Variant:
    """Return a variant that sets options of the framework."""
    return Variant(
        label or ", ".join(f"{n}={v!r}" for n, v in options.items()), {"options": options}
    )


TORCH_GATHER = option("torch.distributed.nn.functional.all_gather", torch_gather=True)


class Framework(ABC):
    """What each framework is asked; all but `train` may be not offered."""

    key: str = ""
    """Its name on the command line, set by `frameworks.load`."""

    package: ClassVar[str]
    """The distribution whose version is shown."""

    variants: ClassVar[dict[str, list[Variant]]] = {}
    """By row: switches to try where the default is wrong."""

    not_offered: ClassVar[dict[str, str]] = {}
    """By row: why the framework is not asked."""

    left_to_users: ClassVar[dict[str, str]] = {}
    """By row: the framework is run as its users would, but what is wrong is not its own."""

    uneven: ClassVar[Callable[[int], Any]] = toys.Numbers
    """A data set of which two processes get different numbers of batches."""

    @abstractmethod
    def train(self, job: Job) -> None:
        """Train in each process; what happens is seen through the toys."""

    def evaluate(self, job: Job) -> float:
        """Return the mean loss over all samples, as process 0 has it."""
        raise NotOffered("evaluation loops are the user's")

    def metric(self, job: Job) -> float:
        """Return the metric of `job` over all samples, as process 0 has it."""
        raise NotOffered("metrics are the user's")

    def log_in_evaluation(self, job: Job) -> float:
        """Train and evaluate; return the figure that its steps log, their mean squared target."""
        raise NotOffered("nothing is logged in evaluation steps")

    def contrast(self, job: Job) -> None:
        """Train with `toys.contrastive` over the outputs of all processes."""
        raise NotOffered("it gathers nothing for losses")

    def logged(self, job: Job) -> list[float]:
        """Train, and return the loss of each step as it is shown."""
        raise NotOffered("the user computes what is logged")

    def gather(self, job: Job, outputs: Callable[[Tensor], Any]) -> list[Any]:
        """Return all rows of `outputs(x)` of an evaluation, as process 0 has them."""
        raise NotOffered("it gathers no outputs of evaluations")

    def break_early(self, job: Job) -> None:
        """Train with accumulation; after the second micro-batch, see one batch of an evaluation."""
        raise NotOffered("evaluations cannot be left early")

    def skips(self, job: Job) -> int | None:
        """Train with an overflow; return the updates that the scheduler counts."""
        raise NotOffered("no gradient scaler without a GPU")

    def checkpoints(self, folder: Path) -> list[Path]:
        """Return the checkpoints in `folder`, oldest first."""
        raise NotOffered("what is saved is the user's")

    def command(self, size: int) -> list[str]:
        """Return what stands before the script's path to start `size` processes: torchrun."""
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]


def size_of_world() -> int:
    """Return for how many processes this one was started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def by_number(paths: Iterable[Path]) -> list[Path]:
    """Sort paths by the last number in their names, and leave out those without one."""
    numbers = {path: re.findall(r"\d+", path.name) for path in paths}
    return sorted((p for p, found in numbers.items() if found), key=lambda p: int(numbers[p][-1]))
