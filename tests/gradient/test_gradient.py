"""The applied gradient does not depend on the split (rule 6), in fp64."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, Run, StepOutput, Trainer

WIDTH, CLASSES = 5, 4
LIMIT = 1e-12  # relative; the figure of rule 6


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Rows of random length, with a label for each token; some labels are ignored."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 31, (samples,), generator=generator).tolist()
        self.rows = []
        for length in lengths:
            labels = torch.randint(0, CLASSES, (length,), generator=generator)
            labels[torch.rand(length, generator=generator) < 0.3] = -100
            self.rows.append(
                (torch.randn(length, WIDTH, dtype=torch.float64, generator=generator), labels)
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same rows one after the other: nobody knows their number ahead."""

    def __init__(self, data: Sentences) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.data.rows)


def join(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    return {
        "inputs": torch.cat([inputs for inputs, _ in rows]),
        "labels": torch.cat([labels for _, labels in rows]),
        "lengths": [len(labels) for _, labels in rows],
    }


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


def token_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The mean over the labelled tokens, and their number."""
    loss = nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])
    return loss, (batch["labels"] != -100).sum()


def sample_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The mean over samples of a sum over each sample's tokens."""
    values = model(batch["inputs"]).pow(2).sum(-1)
    return torch.stack([part.sum() for part in values.split(batch["lengths"])]).mean()


class Sentence(Trainer):
    by_token = True

    def training_step(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        if self.by_token:
            return StepOutput(*token_loss(model, batch))
        return sample_loss(model, batch)


class Gradients(Callback):
    """Keeps the gradient of every step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_gradients(self, run: Run) -> None:
        grads = [p.grad for p in run.module.parameters() if p.grad is not None]
        self.seen.append(torch.cat([grad.flatten().clone() for grad in grads]))


def big_batch_gradients(samples: int, seed: int, window: int, by_token: bool) -> list[Tensor]:
    """The gradient of each step, by one backward over all samples of its window."""
    data, model = Sentences(samples, seed), make_model()
    result = []
    for first in range(0, samples, window):
        batch = join(data.rows[first : first + window])
        model.zero_grad()
        loss = token_loss(model, batch)[0] if by_token else sample_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        result.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))  # type: ignore[union-attr]
    return result


Case = tuple[int, int, int, int, bool, bool]


def fit(case: Case) -> list[Tensor]:
    samples, seed, batch_size, accumulation, by_token, streamed = case
    gradients = Gradients()
    trainer = Sentence(
        max_epochs=1,
        gradient_accumulation_steps=accumulation,
        callbacks=[gradients],
    )
    trainer.by_token = by_token
    data: Any = Sentences(samples, seed)
    data = Stream(data) if streamed else data
    loader: Any = DataLoader(data, batch_size=batch_size, collate_fn=join)
    trainer.fit(make_model(), loader, optimizer=lambda parameters: SGD(parameters, lr=0.0))
    return gradients.seen


def fit_many(rank: int, cases: list[Case]) -> list[list[Tensor]]:
    return [fit(case) for case in cases]


@pytest.mark.parametrize("size", with_few([2], [1, 2, 3]))
def test_gradient_equals_that_of_one_big_batch(size: int) -> None:
    chance = random.Random(size)
    cases: list[Case] = []
    for accumulation, by_token, _ in product((1, 2, 3, 4), (True, False), range(4)):
        samples, seed, batch_size = (chance.randint(*ends) for ends in ((1, 40), (0, 99), (1, 5)))
        cases.append((samples, seed, batch_size, accumulation, by_token, len(cases) % 2 == 0))
    results = run_ranks(size, fit_many, cases)
    for number, (samples, seed, batch_size, accumulation, by_token, _) in enumerate(cases):
        window = batch_size * accumulation * size
        expected = big_batch_gradients(samples, seed, window, by_token)
        for result in results:
            assert len(result[number]) == len(expected)
            for ours, theirs in zip(result[number], expected, strict=True):
                error = (ours.cpu() - theirs).norm() / theirs.norm()
                assert error <= LIMIT, (cases[number], float(error))
