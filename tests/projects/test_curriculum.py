"""A curriculum: easy samples first, more noise later, and a rate for each phase."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, LRSchedule, Trainer
from trainkit.callbacks import Checkpoint, Evaluation

SAMPLES, GLOBAL_BATCH, EPOCHS = 61, 8, 4  # the last step of an epoch is ragged
STEPS = -(-SAMPLES // GLOBAL_BATCH)
PHASES = (1.0, 0.5, 0.5, 0.1)  # of the rate, by epoch


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Samples whose noise grows with the epoch."""

    def __init__(self, features: Tensor, targets: Tensor) -> None:
        self.features, self.targets, self.noise = features, targets, 0.0

    def set_epoch(self, epoch: int) -> None:
        self.noise = 0.1 * epoch

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = self.features[index]
        return features + self.noise * torch.randn_like(features), self.targets[index]


class EasyFirst(Sampler[int]):
    """As many samples in every epoch, from a part of the data that grows with the epoch."""

    def __init__(self, difficulty: Tensor) -> None:
        self.order, self.epoch = difficulty.argsort(), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        part = self.order[: len(self.order) * (self.epoch + 1) // EPOCHS]
        generator = torch.Generator().manual_seed(self.epoch)
        drawn = torch.randint(len(part), (len(self.order),), generator=generator)
        return iter(part[drawn].tolist())


def by_epoch(optimizer: Optimizer) -> LRSchedule:
    return LRSchedule(LambdaLR(optimizer, lambda epoch: PHASES[min(epoch, 3)]), every="epoch")


SCHEDULES: dict[str, dict[str, Any]] = {
    "each phase": {"lr_scheduler": by_epoch},
    "cosine": {"lr_scheduler": "cosine", "warmup": 0.25},
}


def train(rank: int, size: int, accumulation: int, schedule: str, stops: Any, folder: Path) -> Any:
    """Train, in as many sessions as `stops` says; return weights, rates and figures."""
    rates: list[tuple[int, float]] = []
    for stop in stops:
        rates += session(size, accumulation, schedule, stop, folder)[1]
    weights, last_rates, loss = session(size, accumulation, schedule, None, folder)
    return weights, rates + last_rates, loss


def session(
    size: int, accumulation: int, schedule: str, stop_at: int | None, folder: Path
) -> tuple[Tensor, list[tuple[int, float]], float]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    difficulty = features.norm(dim=1)
    targets = (features.sum(1, keepdim=True) + 0.1 * difficulty[:, None]).sin()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    rates: list[tuple[int, float]] = []
    notes = On(
        Callback.on_gradients,
        lambda run: rates.append((run.state.epoch, run.optimizer.param_groups[0]["lr"])),
    )
    trainer = Trainer(
        max_epochs=EPOCHS,
        gradient_accumulation_steps=accumulation,
        callbacks=[notes, StopsAt(stop_at), Evaluation(), Checkpoint()],
        output_dir=folder,
    )
    loader = DataLoader(
        Augmented(features, targets),
        batch_size=GLOBAL_BATCH // size // accumulation,
        sampler=EasyFirst(difficulty),
    )
    result = trainer.fit(
        model,
        (loader, DataLoader(TensorDataset(features, targets), batch_size=7)),
        optimizer=partial(AdamW, lr=0.01),
        loss_fn=nn.MSELoss(),
        resume="auto",
        **SCHEDULES[schedule],
    )
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, rates, result.metrics["eval/loss"]


@pytest.mark.parametrize("schedule", with_few([], SCHEDULES))
def test_a_curriculum_is_the_same_on_one_process_and_on_two(schedule: str, tmp_path: Path) -> None:
    (one,) = run_ranks(1, train, 1, 1, schedule, (), tmp_path / "one")
    weights, rates, loss = one
    if schedule == "cosine":
        assert [rate for _, rate in rates] == sorted_up_and_down(rates)
    else:
        assert rates == [(e, 0.01 * PHASES[e]) for e in range(EPOCHS) for _ in range(STEPS)]
    others = [(2, 1, ()), (2, 2, ()), (2, 1, (5, 19))]  # the last one in three sessions
    for index, (size, accumulation, stops) in enumerate(others):
        folder = tmp_path / str(index)
        results = run_ranks(size, train, size, accumulation, schedule, stops, folder)
        for found, found_rates, found_loss in results:
            torch.testing.assert_close(found, weights, rtol=1e-10, atol=1e-12)
            assert found_rates == rates
            assert found_loss == pytest.approx(loss, rel=1e-10)


def sorted_up_and_down(rates: list[tuple[int, float]]) -> list[float]:
    """Return the rates of a warm-up over a quarter of the run and a fall after it."""
    values = [rate for _, rate in rates]
    warmup = len(values) // 4
    assert len(values) == EPOCHS * STEPS
    assert max(values) == values[warmup] == 0.01
    return sorted(values[:warmup]) + sorted(values[warmup:], reverse=True)
