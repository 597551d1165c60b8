"""A model whose gradients say what was trained on, data for it, and the tape that keeps it.

`Pick` has one parameter for each sample and returns those of the samples that it gets. With the
mean as loss, the gradient at an update is, for each sample, the weight with which it counts: 0 if
it is not part of the update, 1/4 in a batch of four, 1/2 if it is there twice.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info
from typing_extensions import override

BALLAST = 100_000  # numbers that make a checkpoint large enough to be hit


@dataclass
class Tape:
    """What one process saw.

    An instrument is no part of a training. What a model changes in a global is, for trainkit, but
    not what a callback holds: so this looks like one.

    Attributes:
        steps: The gradient of every update, in full.
        rates: The learning rate of every update.
        inputs: Number and random part of every sample that went through the model in training.
        weights: The parameters after the last update of a `Recorder`.
        first: Parameters and buffers, as (smallest, largest), at the first forward in training.
    """

    steps: list[list[float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    inputs: list[tuple[int, float]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    first: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    on_fit_start = None


TAPE = Tape()
AFTER_UPDATE: list[Callable[[int], None]] = []  # called with the number of updates so far


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is `([i, random], i)`; the random part is drawn when it is fetched."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), torch.rand(1).item()]), torch.tensor(float(index))


class Texts(Numbers):
    """Sample i has a label for each of its 1 to 7 tokens, filled up to 8 with -100."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        labels = torch.full((8,), -100)
        labels[: 1 + index * 3 % 7] = 1
        return torch.tensor([float(index), 0.0]), labels


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples of `Numbers`, one after the other, whoever asks."""

    def __init__(self, samples: int) -> None:
        self.numbers = Numbers(samples)

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.numbers[index] for index in range(len(self.numbers)))


class SplitStream(Stream):
    """Splits itself over the workers of a loader, as torch's documentation advises."""

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.numbers[index] for index in range(start, len(self.numbers), step))


class OwnShare(Stream):
    """A stream of which process 0 has three samples, and process 1 has two."""

    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self.numbers[0]] * (2 if os.environ.get("RANK") == "1" else 3))


class Pick(nn.Module):
    """Return the parameter of each sample."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples))

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            if not TAPE.first:
                TAPE.first.update(values(self))
            TAPE.inputs += [(int(number), part) for number, part in x.tolist()]
            self.seen(x)
        return self.weight[x[:, 0].long()]

    def seen(self, x: Tensor) -> None:
        """Do something in every forward of the training."""


class Heavy(Pick):
    """Has much to save; what it has grows by 1 in each forward."""

    ballast: Tensor

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.register_buffer("ballast", torch.zeros(BALLAST))

    @override
    def seen(self, x: Tensor) -> None:
        self.ballast += 1


class VeryHeavy(Heavy):
    """Takes a while to save."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.register_buffer("ballast", torch.zeros(100 * BALLAST))


class Raises(Pick):
    """Raises in the third forward on process 1."""

    @override
    def seen(self, x: Tensor) -> None:
        if _rank() == 1 and len(TAPE.steps) == 2:
            raise RuntimeError("the planned failure")


class Edited(Pick):
    """Changes a parameter after the second update on process 1, behind everybody's back."""

    @override
    def seen(self, x: Tensor) -> None:
        if _rank() == 1 and len(TAPE.steps) == 2:
            self.weight.data[0] += 1.0


class Freezes(Pick):
    """Freezes a part of itself for the second update of four, and thaws it after that."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.scale = nn.Parameter(torch.zeros(1))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * x[:, 0]

    @override
    def seen(self, x: Tensor) -> None:
        self.scale.requires_grad_(len(TAPE.steps) != 1)


class Slow(Pick):
    """Takes its time."""

    @override
    def seen(self, x: Tensor) -> None:
        time.sleep(0.05)


class TurnsNaN(Pick):
    """Is NaN in the third forward, and never again by itself."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * float("nan") if len(TAPE.steps) == 2 else out


class Overflows(Pick):
    """Has an infinite gradient in the second forward of three."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * float("inf") if len(TAPE.inputs) == 4 else out


def values(model: nn.Module) -> dict[str, Any]:
    """Return the parameters, and the smallest and largest value of each buffer."""
    found: dict[str, Any] = {n: p.detach().tolist() for n, p in model.named_parameters()}
    return found | {n: (b.min().item(), b.max().item()) for n, b in model.named_buffers()}


class _Recording:
    """Records gradient and learning rate of each update."""

    param_groups: list[dict[str, Any]]

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        step = [value for g in gradients if g is not None for value in g.tolist()]
        if any(step):  # else it only makes the optimizer's state, before a checkpoint is loaded
            TAPE.steps.append(step)
            TAPE.rates.append(float(self.param_groups[0]["lr"]))
        super().step()  # type: ignore[misc]
        for act in AFTER_UPDATE:
            act(len(TAPE.steps))
        return loss


class Recorder(_Recording, SGD):
    """SGD that records; a parameter is the sum of what its sample counted."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr=lr)

    @override
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        TAPE.weights = [value for p in parameters for value in p.detach().flatten().tolist()]
        return loss


def unequal(params: Any) -> Recorder:
    """Return an optimizer whose learning rate is 1 on process 0, and 1/2 on the others."""
    return Recorder(params, lr=1.0 if _rank() == 0 else 0.5)


def _rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))


class Fused(AdamW):
    """AdamW whose step is one kernel, which leaves out an update that overflowed by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0, fused=True)


class Unfused(AdamW):
    """AdamW in plain torch operations."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0, foreach=False, fused=False)


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss whose value is the mean target as long as the parameters are 0."""
    return (outputs + targets).mean()


def one(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1, whatever comes."""
    return outputs.mean() * 0 + 1


def per_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all tokens: the gradient of a sample is its share of the tokens."""
    mask = targets != -100
    return (outputs[:, None] * mask).sum() / mask.sum()


def tokens(targets: Tensor) -> Tensor:
    """Return over how many tokens `per_token` is a mean."""
    return (targets != -100).sum()


def terms(outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return two means with their counts: over all samples, and over the samples 0, 1, 2 and 4."""
    some = (targets < 3) | (targets == 4)
    everything = outputs.mean(), torch.tensor(len(targets))
    return {"all": everything, "some": ((outputs * some).sum() / some.sum(), some.sum())}


def two_terms(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of both."""
    return sum((loss for loss, _ in terms(outputs, targets).values()), torch.zeros(()))


def without_some(samples: list[tuple[Tensor, Tensor]]) -> Any:
    """Make a batch without the samples 1 and 3, as one that leaves out what it cannot read."""
    return default_collate([each for each in samples if int(each[1]) not in (1, 3)])


def texts(x: Tensor) -> dict[str, list[str]]:
    """Return an output that is a dict of lists of strings."""
    return {"text": [f"sample {int(number)}" for number, _ in x.tolist()]}


def ragged(x: Tensor) -> Tensor:
    """Return for sample i the number i + 1, i % 3 + 1 times; filled up to the batch's longest."""
    rows = [[int(number) + 1.0] * (int(number) % 3 + 1) for number, _ in x.tolist()]
    longest = max(map(len, rows))
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows])


def contrastive(own: Tensor, numbers: Tensor, others: Tensor, their_numbers: Tensor) -> Tensor:
    """Return InfoNCE of our embeddings against those of all processes, itself left out.

    Samples 2k and 2k + 1 belong together; who gets which does not matter.
    """
    logits = own @ others.T
    logits = logits.masked_fill(numbers[:, None] == their_numbers, float("-inf"))
    partner = torch.where(numbers % 2 == 0, numbers + 1, numbers - 1)
    found = (partner[:, None] == their_numbers).long().argmax(1)
    return nn.functional.cross_entropy(logits, found)


def torch_gather(rows: Tensor) -> Tensor:
    """Return the rows of all processes with their gradients, as torch has it."""
    from torch.distributed.nn.functional import all_gather

    return torch.cat(all_gather(rows))


def touch_after(updates: int, path: Path) -> Callable[[int], None]:
    """Return what tells another process that so many updates are done."""
    return lambda done: path.touch() if done == updates else None


def kill_me() -> None:
    """Die as by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)
