"""Small data sets, and places in a job that needs no other process."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from trainkit.data import MicroBatch, PreparedLoader, evaluation_loader, training_loader

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """The place of one process; enough for data whose counts are known from the order."""

    rank: int = 0
    size: int = 1
    control: None = None


class Numbers(Dataset[Tensor]):
    """The numbers 0 to n-1, and which of them were asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.asked.append(index)
        return torch.tensor(index)


class Noisy(Dataset[Tensor]):
    """Samples that draw from all global generators, as augmentation does."""

    def __init__(self, length: int = 12) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        import numpy

        return torch.tensor(
            [index, random.random(), numpy.random.random(), float(torch.rand(())), self.epoch],
            dtype=torch.float64,
        )


class Stream(IterableDataset[Tensor]):
    """The numbers 0 to n-1 with noise; a part of them where it thinks that it shares the work."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, step):
            yield torch.tensor([index, random.random(), self.epoch], dtype=torch.float64)


class Buckets:
    """A batch sampler of its own: batches of 1, 2, 3, 1, ... indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size % 3 + 1


def prepare(loader: Any, rank: int = 0, size: int = 1, **settings: Any) -> PreparedLoader:
    """Prepare `loader` for training, as process `rank` of `size` would."""
    place: Any = Place(rank, size)
    return training_loader(loader, processes=place, device=CPU, **{"seed": 7, **settings})


def prepare_evaluation(loader: Any, rank: int = 0, size: int = 1, **settings: Any) -> Any:
    """Prepare `loader` for evaluation, as process `rank` of `size` would."""
    place: Any = Place(rank, size)
    return evaluation_loader(loader, processes=place, device=CPU, **{"seed": 7, **settings})


def micro_batches(loader: PreparedLoader, epoch: int = 0, **where: Any) -> list[MicroBatch]:
    """Return the micro-batches of the windows of an epoch."""
    return [part for window in loader.windows(epoch, **where) for part in window]


def values(parts: list[MicroBatch]) -> list[Any]:
    """Return the first column of the real samples in `parts`."""
    found: list[Any] = []
    for part in parts:
        column = part.data if part.data.ndim == 1 else part.data[:, 0]
        found += column[: part.count].tolist()
    return found


def interleaved(loaders: list[PreparedLoader], epoch: int = 0) -> list[list[MicroBatch]]:
    """Return, for each round, the micro-batches of all processes."""
    rounds = [micro_batches(loader, epoch) for loader in loaders]
    return [list(parts) for parts in zip(*rounds, strict=True)]


def loader_of(dataset: Any, **settings: Any) -> DataLoader[Any]:
    """Return a `DataLoader`; the type checker does not know what it yields."""
    return DataLoader(dataset, **settings)
