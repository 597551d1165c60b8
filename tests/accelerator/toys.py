"""A loop of the user's own, small, for tests."""

import random
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainkit import Accelerator


class Noisy(Dataset[Any]):
    """Ten numbers with noise from the global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item() + random.random()


class Stream(IterableDataset[Any]):
    """Numbers that come one after the other; nobody knows how many.

    Args:
        length: How many.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        yield from torch.arange(self.length, dtype=torch.float32).unsqueeze(1)


def numbers(length: int) -> TensorDataset:
    """Return a data set of the numbers from 0 on, one feature each."""
    return TensorDataset(torch.arange(length, dtype=torch.float32).unsqueeze(1))


def small() -> nn.Module:
    """Return a model with dropout and fixed weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1))


def prepared(accelerator: Accelerator, data: Any = None, **options: Any) -> tuple[Any, ...]:
    """Return a prepared model, optimizer, scheduler and loader."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    loader = DataLoader(data or numbers(22), 2, shuffle=True, **options)
    found: tuple[Any, ...] = accelerator.prepare(model, optimizer, schedule, loader)
    return found


def bits(model: nn.Module) -> list[int]:
    """Return the bits of the weights."""
    flat = torch.cat([value.detach().flatten() for value in model.state_dict().values()])
    found: list[int] = flat.view(torch.int32).tolist()
    return found
