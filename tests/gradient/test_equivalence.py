"""One, two and three processes are the same training at the same global batch (rule 14)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, Run, StepResult, Trainer

LIMIT = 1e-12


class Losses(Callback):
    """Keeps the logged training loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.values.append(values["loss"])


def fit_losses(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).double()
    data = TensorDataset(torch.randn(64, 6).double(), torch.randint(0, 3, (64,)))
    losses = Losses()
    Trainer(max_steps=50, callbacks=[losses], log_every_n_steps=1, max_grad_norm=0.5).fit(
        model,
        DataLoader(data, batch_size=6 // size, shuffle=True),
        optimizer=partial(AdamW, lr=1e-2),
        loss_fn=nn.functional.cross_entropy,
    )
    return losses.values


def test_loss_curves_are_equal_on_one_two_and_three_processes() -> None:
    curves = [run_ranks(size, fit_losses, size)[0] for size in (1, 2, 3)]
    assert len(curves[0]) == 50
    for curve in curves[1:]:
        assert max(abs(a - b) / abs(a) for a, b in zip(curves[0], curve, strict=True)) <= LIMIT


class Numbers(Dataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Stream(IterableDataset[Tensor]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(float(index)) for index in range(self.samples))


class Uneven:
    """A batch sampler with batches of 1, 2, 3, 1, 2, 3 ... samples, last first."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        left, size = list(range(self.samples)), 1
        while left:
            yield left[-size:]
            del left[-size:]
            size = size % 3 + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


def make_loader(kind: str, samples: int, workers: int) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": workers}
    if kind == "iterable":
        return DataLoader(Stream(samples), batch_size=2, **options)
    if kind == "batch sampler":
        return DataLoader(Numbers(samples), batch_sampler=Uneven(samples), **options)
    return DataLoader(Numbers(samples), batch_size=2, shuffle=kind == "shuffled", **options)


class Recorder(Callback):
    def __init__(self) -> None:
        self.samples: list[int] = []
        self.steps = 0

    def on_microbatch_start(self, run: Run, batch: Tensor) -> None:
        assert not run.zero_weight
        self.samples += [int(value) for value in batch]

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.steps += 1


class Toy(Trainer):
    def training_step(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch[:, None]).mean()  # type: ignore[no-any-return]


def fit_epochs(rank: int, cases: list[tuple[str, int, int]]) -> list[tuple[list[int], int, int]]:
    results = []
    for kind, samples, workers in cases:
        recorder = Recorder()
        run = Toy(max_epochs=2, callbacks=[recorder], seed=5)
        result = run.fit(
            nn.Linear(1, 1),
            make_loader(kind, samples, workers),
            optimizer=partial(torch.optim.SGD, lr=0.0),
        )
        results.append((recorder.samples, recorder.steps, result.samples_seen))
    return results


@pytest.mark.parametrize("size", with_few([], [1, 2, 3]))
def test_an_epoch_uses_every_sample_exactly_once(size: int) -> None:
    cases = [
        (kind, samples, workers)
        for kind in ("ordered", "shuffled", "batch sampler", "iterable")
        for samples in (1, 2, 5, 7, 16, 33)
        for workers in (0, 2)
        if workers == 0 or samples in (1, 7)  # starting workers is slow
    ]
    by_rank = run_ranks(size, fit_epochs, cases, timeout=240)
    for number, (kind, samples, workers) in enumerate(cases):
        used = sorted(sample for result in by_rank for sample in result[number][0])
        assert used == sorted(2 * list(range(samples))), (kind, samples, workers)
        assert len({result[number][1] for result in by_rank}) == 1
        assert all(result[number][2] == 2 * samples for result in by_rank)
