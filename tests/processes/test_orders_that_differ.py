"""Processes that draw other orders of the samples are refused before the first step (rule 3)."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_model
from trainkit import Combined, ConfigError, Trainer


class Shuffled(Sampler[int]):
    """A sampler of a user's own, with a seed that its author forgot to make equal."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed = data, seed

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        return iter(torch.randperm(len(self.data), generator=generator).tolist())


def loader(kind: str, rank: int) -> DataLoader[Any]:
    data = toy_dataset(32)
    if kind == "loader":
        return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(rank))
    if kind == "weights":
        weights = [1.0 + rank * index for index in range(32)]
        return DataLoader(data, 4, sampler=WeightedRandomSampler(weights, 32))
    if kind == "own":
        return DataLoader(data, 4, sampler=Shuffled(data, rank))
    generator = torch.Generator().manual_seed(rank)
    return DataLoader(data, 4, sampler=RandomSampler(data, generator=generator))


def loaders(kind: str, rank: int) -> Any:
    if kind == "several":
        return Combined({"a": loader("loader", 0), "b": loader("loader", rank)}, "min")
    return loader(kind, rank), None


class Both(Trainer):
    """A step for several loaders."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in batch.values()]
        return torch.stack(losses).mean()


def begin(rank: int, kind: str, strategy: Any) -> None:
    if kind == "several":
        trainer: Trainer = Both(max_steps=3, callbacks=[], strategy=strategy)
        optimizer = partial(SGD, lr=0.1)
        trainer.fit(toy_model(), loaders(kind, rank), optimizer=optimizer)
    else:
        fit(make_trainer(strategy=strategy), loaders(kind, rank))


def refuse(rank: int, kind: str) -> None:
    with pytest.raises(ConfigError, match="draw other orders of the training samples"):
        begin(rank, kind, "fsdp" if kind == "own" else "ddp")
    begin(0, kind, "ddp")  # which all draw alike


@pytest.mark.e2e
def test_another_order_on_one_process_is_refused() -> None:
    kinds = ("loader", "random", "own", "weights", "several")
    run_ranks(2, in_turn, refuse, [(kind,) for kind in kinds])
