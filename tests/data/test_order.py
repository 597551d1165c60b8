"""The order of an epoch is that of the loader's own sampler, however it is drawn."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from tests.data.toys import prepare
from trainkit import Accelerator, ConfigError
from trainkit.basics import rng
from trainkit.data.order import KeyedOrder
from trainkit.data.plan import FlatPlan

SEED, LENGTH = 5, 23
DATA = TensorDataset(torch.arange(LENGTH))


class OneByOne(RandomSampler):
    """A sampler that is not torch's own, though it does the same."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Any] = {
    "sequential": lambda: SequentialSampler(DATA),
    "shuffled": lambda: RandomSampler(DATA),
    "with a generator": lambda: RandomSampler(DATA, generator=seeded(3)),
    "with replacement": lambda: RandomSampler(DATA, replacement=True),
    "a part": lambda: RandomSampler(DATA, num_samples=7),
    "more than once": lambda: RandomSampler(DATA, num_samples=50),
    "of one's own": lambda: OneByOne(DATA, generator=seeded(3)),
}


def one_by_one(sampler: Any, epoch: int) -> list[int]:
    """Return what the sampler yields under the key of an epoch."""
    key = rng.order_seed(SEED, epoch)
    state = rng.save_host()
    try:
        rng.seed_host(key)
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(rng.derive(key, sampler.generator.initial_seed()))
        return list(sampler)
    finally:
        rng.restore_host(state)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_order_is_that_of_the_sampler(kind: str, epoch: int) -> None:
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, sampler=SAMPLERS[kind]())
    order = KeyedOrder(loader, SEED)
    before = torch.get_rng_state()
    found = [int(index) for index in order.run(epoch)]
    assert found == one_by_one(SAMPLERS[kind](), epoch)
    assert found == [int(index) for index in order.run(epoch)]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_numbers_of_an_order_are_never_in_python() -> None:
    calls = {}
    for length in (10, 10_000):
        data = TensorDataset(torch.empty(length))
        order = KeyedOrder(DataLoader(data, batch_size=4, shuffle=True), SEED)
        seen: list[object] = []

        def record(frame: FrameType, event: str, argument: Any, seen: Any = seen) -> None:
            seen.append(event)

        sys.setprofile(record)
        FlatPlan(order.run(0), batch_size=4, rank=0, size=2)
        sys.setprofile(None)
        calls[length] = len(seen)
    assert calls[10] == calls[10_000]


def test_keys_of_single_samples_stay_numbers() -> None:
    class Keyed(TensorDataset):
        def __getitem__(self, key: Any) -> Any:
            assert type(key) is int
            return self.tensors[0][key], 0

    loader: DataLoader[Any] = DataLoader(Keyed(torch.arange(6)), batch_size=None, shuffle=True)
    found = [batch.data[0] for batch in prepare(loader).batches(0)]
    assert len(found) == 6


class Endless(OneByOne):
    """Passes one after the other, without an end, as for a loop that counts steps."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(LENGTH)


def test_a_sampler_without_an_end_is_refused_before_it_takes_all_memory() -> None:
    loader = DataLoader(DATA, 4, sampler=Endless(DATA))
    with pytest.raises(ConfigError, match="`Endless`, has yielded"):
        next(prepare(loader).windows(0))
    with pytest.raises(ConfigError, match="has yielded"):
        next(iter(Accelerator(cpu=True).prepare(loader)))
    many = RandomSampler(DATA, replacement=True, num_samples=200_000)
    assert len(KeyedOrder(DataLoader(DATA, 4, sampler=many), SEED).run(0)) == 200_000
