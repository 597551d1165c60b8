"""Samplers with a random state of their own: a state finds them where it left them, or says no."""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from tests.helpers.ranks import run_ranks
from trainkit import Accelerator, CheckpointError, DataLoaderConfiguration, set_seed
from trainkit.accelerator import mapped
from trainkit.data.order_facts import digest_of

SAMPLES = 24
PASSES = 4


class Own(Sampler[int]):
    """Draws from a generator of its own, which nobody sets back."""

    def __init__(self, seed: int | None) -> None:
        self.random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Keyed(Own):
    """One that also hears of the epoch, and gives another part of the data in each."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (index * (5 + 2 * (self.epoch == 1)) % SAMPLES for index in super().__iter__())


class Restored(Own):
    """One whose generator is saved and put back."""

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]


def prepared(sampler: Any, batched: bool, register: bool) -> tuple[Accelerator, Any]:
    set_seed(4)
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    order: Any = {"batch_size": 4, "sampler": sampler}
    if batched:
        order = {"batch_sampler": BatchSampler(sampler, 4, drop_last=False)}
    if register:
        accelerator.register_for_checkpointing(sampler)
    return accelerator, accelerator.prepare(DataLoader(range(SAMPLES), **order))  # type: ignore[arg-type]


def loop(
    sampler: Any,
    folder: Path,
    *,
    load: bool = False,
    stop: int = -1,
    leave: int = 0,
    batched: bool = False,
    register: bool = False,
) -> list[list[int]]:
    """Return what each pass reads; save after `stop` batches, and end there.

    Args:
        sampler: What gives the order.
        folder: Where the state is.
        load: Whether to go on with it.
        stop: Batches of the whole loop before the state is saved; on a multiple of a pass the pass
            is over then.
        leave: Batches after which the first pass is left.
        batched: Whether the sampler is inside a batch sampler.
        register: Whether it is registered for checkpointing.
    """
    accelerator, loader = prepared(sampler, batched, register)
    if load:
        accelerator.load_state(folder)
    inside = stop % len(loader) > 0
    batches, seen = loader.epoch * len(loader), list[list[int]]()
    for _ in range(loader.epoch, PASSES):
        seen.append([])
        for batch in loader:
            seen[-1] += batch.tolist()
            batches += 1
            if batches == stop and inside:
                accelerator.save_state(folder)
                return seen
            if batches == leave:
                break
        if batches == stop:
            accelerator.save_state(folder)
            return seen
    return seen


@pytest.mark.parametrize("kind", [Own, Keyed])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("stop", [6, 12, 18, 2, 14])
def test_it_goes_on_where_it_was(stop: int, batched: bool, kind: Any, tmp_path: Path) -> None:
    whole = loop(kind(3), tmp_path / "whole", batched=batched)
    assert len({tuple(one) for one in whole}) == PASSES
    first = loop(kind(3), tmp_path, stop=stop, batched=batched)
    rest = loop(kind(3), tmp_path, load=True, batched=batched)
    assert [*chain(*first, *rest)] == [*chain(*whole)]


def test_a_pass_that_was_left_counts(tmp_path: Path) -> None:
    """The state is saved between two passes, the first of which was left after two batches."""
    whole = loop(Own(3), tmp_path / "whole", leave=2)
    loop(Own(3), tmp_path, leave=2, stop=8)  # 2 of the first, 6 of the second
    assert loop(Own(3), tmp_path, load=True)[0] == whole[2]


def test_it_may_be_resumed_again_and_on_other_processes(tmp_path: Path) -> None:
    whole = loop(Own(3), tmp_path / "whole")
    loop(Own(3), tmp_path, stop=6)
    loop(Own(3), tmp_path, load=True, stop=12)
    both = run_ranks(2, on_ranks, tmp_path)
    assert sorted(both[0][:4] + both[1][:4]) == sorted(whole[2][:8])


def on_ranks(rank: int, folder: Path) -> list[int]:
    return loop(Own(3), folder, load=True)[0]


def again(rank: int, folder: Path, load: bool, stop: int) -> list[list[int]]:
    return loop(Own(3), folder, load=load, stop=stop)


@pytest.mark.e2e
def test_two_processes_go_on_as_well(tmp_path: Path) -> None:
    whole = run_ranks(2, again, tmp_path / "whole", False, -1)
    run_ranks(2, again, tmp_path, False, 6)
    rest = run_ranks(2, again, tmp_path, True, -1)
    assert rest == [one[2:] for one in whole]


@pytest.mark.parametrize("stop", [6, 14])
def test_one_that_cannot_is_refused(stop: int, tmp_path: Path) -> None:
    loop(Own(None), tmp_path, stop=stop)
    with pytest.raises(CheckpointError, match=r"keeps a random state of its own.*`set_epoch`"):
        loop(Own(None), tmp_path, load=True)


def test_one_that_is_registered_may_begin_anywhere(tmp_path: Path) -> None:
    sampler = Restored(None)
    loop(sampler, tmp_path, stop=6, register=True)
    following = Restored(None)
    following.load_state_dict(sampler.state_dict())
    seen = loop(Restored(None), tmp_path, load=True, register=True)
    assert seen[0] == list(following)


def test_a_state_may_be_loaded_where_it_was_saved(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(SAMPLES), 4, sampler=Own(None)))  # type: ignore[arg-type]
    list(loader)
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    list(loader)
    with pytest.raises(CheckpointError, match="keeps a random state of its own"):
        accelerator.load_state(tmp_path)


def test_another_order_is_allowed_between_two_passes(tmp_path: Path) -> None:
    loop(list(range(SAMPLES)), tmp_path, stop=6)
    backwards = list(range(SAMPLES - 1, -1, -1))
    assert loop(backwards, tmp_path, load=True)[0] == backwards


def test_the_order_of_a_pass_is_digested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[Any] = []

    def digest(order: Any) -> str | None:
        digested.append(order)
        return digest_of(order)

    monkeypatch.setattr(mapped, "digest_of", digest)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(SAMPLES), 4, shuffle=True))  # type: ignore[arg-type]
    for _ in range(2):
        for _ in loader:
            accelerator.save_state(tmp_path / "state")
    assert len(digested) == 2


def test_the_order_does_not_depend_on_persistent_workers() -> None:
    orders = []
    for is_persistent in (False, True):
        set_seed(0)
        workers: dict[str, Any] = {"num_workers": 1, "persistent_workers": is_persistent}
        loader = Accelerator(cpu=True).prepare(
            DataLoader(range(SAMPLES), 4, shuffle=True, **workers)  # type: ignore[arg-type]
        )
        orders.append([torch.cat(list(loader)).tolist() for _ in range(3)])
    assert orders[0] == orders[1]
