"""Generators that a data set owns run under the keys of its samples (rule 13)."""

import dis
import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.data.toys import CPU, Place
from trainkit.data import training_loader

SAMPLES = 12


class Shift:
    """A transform of some library, with a generator inside."""

    def __init__(self, kind: str) -> None:
        self.generator: Any = {
            "torch": torch.Generator,
            "numpy": np.random.default_rng,
            "old numpy": np.random.RandomState,
            "python": random.Random,
        }[kind]()

    def __call__(self, value: Tensor) -> Tensor:
        if isinstance(self.generator, torch.Generator):
            return value + torch.randn((), generator=self.generator)
        return value + float(getattr(self.generator, "normal", self.generator.random)())


class Shifted(Dataset[Tensor]):
    def __init__(self, kind: str) -> None:
        self.transforms: dict[str, list[Any]] = {"both": [Shift(kind), partial(_call, Shift(kind))]}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        value = torch.tensor(float(index))
        return torch.stack([transform(value) for transform in self.transforms["both"]])


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Lazy(Dataset[Tensor]):
    """Makes its generator with its first sample, as for the worker that it finds itself in."""

    generator: Any = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if self.generator is None:
            self.generator = np.random.default_rng(torch.initial_seed())
        return torch.tensor(index + self.generator.normal())


NOISE = np.random.default_rng(0)


class Global(Dataset[Tensor]):
    """Draws from a generator of its file, by way of a function."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index + _noise())


def _noise() -> float:
    return float(NOISE.normal())


def _call(transform: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    return transform(value)


def _read(loader: Any, *, epoch: int = 1, position: int = 0, seed: int = 0) -> Tensor:
    place: Any = Place()
    prepared = training_loader(loader, processes=place, device=CPU, seed=seed)
    batches = [batch.data for batch in prepared.batches(epoch, position=position)]
    prepared.close()
    return torch.cat(batches)


def _check(make: Callable[[], Any]) -> None:
    whole = _read(make())
    assert torch.equal(whole, _read(make()))
    assert torch.equal(whole[6:], _read(make(), position=6))
    assert not torch.equal(whole.sort(0)[0], _read(make(), epoch=2).sort(0)[0])
    assert not torch.equal(whole.sort(0)[0], _read(make(), seed=1).sort(0)[0])


@pytest.mark.parametrize("kind", ["torch", "numpy", "old numpy", "python"])
def test_samples_do_not_depend_on_what_was_drawn_before(kind: str) -> None:
    _check(lambda: DataLoader(Shifted(kind), batch_size=3, shuffle=True))
    both = _read(DataLoader(Shifted(kind), batch_size=3))
    assert not torch.equal(both[:, 0], both[:, 1])  # each has a stream of its own


@pytest.mark.parametrize("data", [partial(Shifted, "numpy"), Lazy, Global])
def test_workers_read_what_this_process_reads(data: Callable[[], Any]) -> None:
    here = _read(DataLoader(data(), batch_size=3, shuffle=True))
    for persistent in (False, True):
        loader: Any = DataLoader(
            data(), batch_size=3, shuffle=True, num_workers=2, persistent_workers=persistent
        )
        assert torch.equal(here, _read(loader))


def test_collate_functions_are_keyed() -> None:
    _check(lambda: DataLoader(Indices(), 3, collate_fn=_keyed_collate()))


def _keyed_collate() -> Callable[[list[int]], Tensor]:
    noise = Shift("python")

    def collate(samples: list[int]) -> Tensor:
        return noise(torch.tensor(samples))

    return collate


def test_a_generator_that_a_sampler_shares_is_left_as_it_was() -> None:
    data = Shifted("torch")
    shared = data.transforms["both"][0].generator
    before = shared.get_state()
    first = _read(DataLoader(data, batch_size=3, shuffle=True, generator=shared))
    assert torch.equal(shared.get_state(), before)
    assert torch.equal(first, _read(DataLoader(data, batch_size=3, shuffle=True, generator=shared)))


def test_the_code_of_functions_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Mock(wraps=dis.get_instructions)
    monkeypatch.setattr(dis, "get_instructions", reading)
    counts = []
    for epoch in (1, 2, 3):
        _read(DataLoader(Global(), 4), epoch=epoch)
        counts.append(reading.call_count)
    assert counts[0] == counts[1] == counts[2]
