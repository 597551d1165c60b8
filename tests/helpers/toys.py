"""A small model, small data, and a trainer for them."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import FitResult, Trainer

SAMPLES = 32
FEATURES = 4


def toy_model(seed: int = 0) -> nn.Module:
    """Return a classifier of two classes with fixed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 2))


def toy_dataset(samples: int = SAMPLES, seed: int = 0) -> TensorDataset:
    """Return features, and the class that the sign of their sum gives."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(features, (features.sum(1) > 0).long())


def toy_loaders(samples: int = SAMPLES, batch_size: int = 4) -> tuple[Any, Any]:
    """Return a shuffled training loader and an evaluation loader."""
    return (
        DataLoader(toy_dataset(samples), batch_size=batch_size, shuffle=True),
        DataLoader(toy_dataset(samples // 2, seed=1), batch_size=batch_size),
    )


def make_trainer(**settings: Any) -> Trainer:
    """Return a trainer without callbacks, for one epoch unless told otherwise."""
    if "max_steps" not in settings:
        settings.setdefault("max_epochs", 1)
    settings.setdefault("callbacks", [])
    return Trainer(**settings)


def fit(
    trainer: Trainer, loaders: Any = None, model: nn.Module | None = None, **arguments: Any
) -> FitResult:
    """Train the toy model on the toy data, or what is given, by SGD on the cross entropy."""
    arguments.setdefault("optimizer", partial(torch.optim.SGD, lr=0.1))
    arguments.setdefault("loss_fn", nn.CrossEntropyLoss())
    loaders = toy_loaders() if loaders is None else loaders
    return trainer.fit(toy_model() if model is None else model, loaders, **arguments)


class Registered:
    """An object with a state, to be registered for checkpointing."""

    value: Any = 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Scripted(Trainer):
    """Evaluates to the values that it was given, one after each epoch."""

    values: list[float]

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        assert self.run is not None
        return {"mine": self.values[self.run.state.epoch - 1]}
