"""Map-style loaders: the order, the cuts, each sample once (rules 14-17)."""

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.data.toys import (
    Buckets,
    Numbers,
    interleaved,
    loader_of,
    micro_batches,
    prepare,
    prepare_evaluation,
    values,
)
from trainkit.basics.rng import derive, order_seed, restore_host, save_host, seed_host
from trainkit.errors import ConfigError, DataError


def _plain_order(loader: Any, epoch: int) -> list[int]:
    state = save_host()
    seed_host(order_seed(7, epoch))
    order = list(loader.sampler)
    restore_host(state)
    return order


@pytest.mark.parametrize("kind", ["sequential", "shuffled", "buckets", "split buckets"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 5, 7, 16, 33])
def test_an_epoch_uses_every_sample_once(length: int, size: int, kind: str) -> None:
    if "buckets" in kind:
        loader = loader_of(Numbers(length), batch_sampler=Buckets(length))
    else:
        loader = loader_of(Numbers(length), batch_size=2, shuffle=kind == "shuffled")
    split = kind == "split buckets"
    ranks = [prepare(loader, rank, size, split_batches=split) for rank in range(size)]
    rounds = interleaved(ranks)
    seen = [value for parts in rounds for value in values(parts)]
    assert sorted(seen) == list(range(length))
    for parts in rounds:
        assert {part.total for part in parts} == {sum(part.count for part in parts)}
        assert all(len(part.data) > 0 for part in parts)
    if kind == "shuffled":
        assert seen == _plain_order(loader, 0)
    else:
        assert seen == list(range(length))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 5, 16])
def test_workers_change_nothing(length: int, size: int) -> None:
    for rank in range(size):
        here = loader_of(Numbers(length), batch_size=2, shuffle=True)
        apart = loader_of(Numbers(length), batch_size=2, shuffle=True, num_workers=2)
        expected = micro_batches(prepare(here, rank, size))
        found = micro_batches(prepare(apart, rank, size))
        assert [part.data.tolist() for part in found] == [part.data.tolist() for part in expected]
        assert [part.count for part in found] == [part.count for part in expected]


def test_a_global_batch_is_the_same_samples_on_any_number_of_processes() -> None:
    one = prepare(loader_of(Numbers(23), batch_size=6, shuffle=True))
    expected = [values([part]) for part in micro_batches(one, epoch=3)]
    for size in (2, 3):
        loader = loader_of(Numbers(23), batch_size=6 // size, shuffle=True)
        rounds = interleaved([prepare(loader, rank, size) for rank in range(size)], epoch=3)
        assert [values(parts) for parts in rounds] == expected
        split = loader_of(Numbers(23), batch_size=6, shuffle=True)
        ranks = [prepare(split, rank, size, split_batches=True) for rank in range(size)]
        assert [values(parts) for parts in interleaved(ranks, epoch=3)] == expected


def test_the_order_is_that_of_the_users_sampler_under_the_key() -> None:
    weights = [float(weight) for weight in range(1, 11)]
    for sampler in (
        RandomSampler(range(10)),
        RandomSampler(range(10), replacement=True, num_samples=13),
        WeightedRandomSampler(weights, 9),
    ):
        loader = loader_of(Numbers(10), batch_size=3, sampler=sampler)
        for epoch in (0, 4):
            assert values(micro_batches(prepare(loader), epoch)) == _plain_order(loader, epoch)


def test_a_samplers_own_generator_is_keyed_and_left_as_it_was() -> None:
    own = torch.Generator().manual_seed(5)
    loader = loader_of(Numbers(10), batch_size=3, shuffle=True, generator=own)
    prepared = prepare(loader)
    before = own.get_state()
    torch.rand(3, generator=own)
    drawn = own.get_state()
    found = values(micro_batches(prepared, epoch=1))
    assert torch.equal(own.get_state(), drawn)
    key = torch.Generator().manual_seed(derive(order_seed(7, 1), 5))
    own.set_state(key.get_state())
    assert found == list(loader.sampler)
    own.set_state(before)
    other = loader_of(
        Numbers(10), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(6)
    )
    assert found != values(micro_batches(prepare(other), epoch=1))


def test_epochs_differ_and_repeat() -> None:
    prepared = prepare(loader_of(Numbers(30), batch_size=4, shuffle=True))
    first, second = (values(micro_batches(prepared, epoch)) for epoch in (0, 1))
    assert first != second
    assert values(micro_batches(prepared, 0)) == first
    assert [int(value) for batch in prepared for value in batch] == first
    assert [int(value) for batch in prepared for value in batch] == second


def test_evaluation_has_an_order_of_its_own_that_does_not_change() -> None:
    loader = loader_of(Numbers(30), batch_size=4, shuffle=True)
    prepared = prepare_evaluation(loader)
    first = values(list(prepared.batches(0)))
    assert values(list(prepared.batches(0))) == first
    assert first != values(micro_batches(prepare(loader)))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_a_resume_reads_only_what_is_left(accumulation: int, size: int) -> None:
    loader = loader_of(Numbers(19), batch_size=2, shuffle=True)
    whole = list(prepare(loader, 0, size).windows(2, accumulation=accumulation))
    position = 0
    for done, window in enumerate(whole):
        numbers = Numbers(19)
        resumed = prepare(loader_of(numbers, batch_size=2, shuffle=True), 0, size)
        rest = micro_batches(resumed, 2, position=position, accumulation=accumulation)
        assert sum(part.total for part in rest) == 19 - position
        assert sum(part.last for part in rest) == len(whole) - done
        assert sorted(numbers.asked) == sorted(values(rest))
        assert window.total is not None
        position += window.total
    assert position == 19
    assert micro_batches(prepare(loader, 0, size), 2, position=19) == []


def test_a_position_inside_a_global_batch_is_an_error() -> None:
    for loader in (
        loader_of(Numbers(10), batch_size=4),
        loader_of(Numbers(10), batch_sampler=Buckets(10)),
    ):
        for position in (2, 11, -1):
            with pytest.raises(DataError, match=f"position is {position} of the epoch's 10"):
                micro_batches(prepare(loader), position=position)


def test_windows_know_their_size() -> None:
    prepared = prepare(loader_of(Numbers(11), batch_size=2), 0, 2)
    windows = [(w.total, w.size, [part.last for part in w]) for w in prepared.windows(0)]
    assert windows == [(4, 1, [True]), (4, 1, [True]), (3, 1, [True])]
    windows = [
        (w.total, w.size, [part.last for part in w]) for w in prepared.windows(0, accumulation=2)
    ]
    assert windows == [(8, 2, [False, True]), (3, 1, [True])]
    assert prepared.nominal_window(2) == 8
    assert prepared.steps_per_epoch(2, drop_last=False) == 2


@pytest.mark.parametrize(("size", "batch", "accumulation"), [(1, 1, 4), (1, 2, 2), (2, 2, 1)])
def test_dropping_the_last_window_does_not_depend_on_the_split(
    size: int, batch: int, accumulation: int
) -> None:
    for length, windows in ((8, 2), (7, 1), (5, 1)):
        prepared = prepare(loader_of(Numbers(length), batch_size=batch), 0, size)
        found = list(prepared.windows(0, accumulation=accumulation, drop_last=True))
        assert len(found) == windows == prepared.steps_per_epoch(accumulation, drop_last=True)


def test_a_window_left_early_does_not_shift_the_next() -> None:
    prepared = prepare(loader_of(Numbers(8), batch_size=1))
    firsts = []
    for window in prepared.windows(0, accumulation=3):
        for part in window:
            firsts.append(int(part.data))
            break
    assert firsts == [0, 3, 6]


def test_drop_last_of_training_drops_the_incomplete_global_batch() -> None:
    loader = loader_of(Numbers(11), batch_size=2, drop_last=True)
    rounds = interleaved([prepare(loader, rank, 2) for rank in range(2)])
    assert [values(parts) for parts in rounds] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert prepare(loader, 0, 2).samples_per_epoch == 8


def test_drop_last_of_evaluation_drops_what_one_process_would() -> None:
    loader = loader_of(Numbers(11), batch_size=2, drop_last=True)
    seen = []
    for parts in zip(*(prepare_evaluation(loader, r, 3).batches(0) for r in range(3)), strict=True):
        seen += values(list(parts))
    assert seen == list(range(10))


def test_an_idle_process_repeats_its_last_batch_in_its_own_containers() -> None:
    class Dicts(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)}

    loader = loader_of(Dicts(5), batch_size=2)
    parts = [
        (part.data.pop("x").tolist(), part.count, part.total)
        for part in prepare(loader, 1, 2).batches(0)
    ]
    assert parts == [([2, 3], 2, 4), ([2, 3], 0, 1)]


def test_an_idle_process_that_had_nothing_gets_the_first_samples() -> None:
    loader = loader_of(Numbers(5), batch_size=2)
    (part,) = prepare(loader, 1, 2).batches(0, position=4)
    assert (part.data.tolist(), part.count, part.total) == ([0, 1], 0, 1)
    (part,) = prepare(loader_of(Numbers(1), batch_size=4), 2, 3).batches(0)
    assert (part.data.tolist(), part.count, part.total) == ([0], 0, 1)


def test_set_epoch_reaches_samplers_and_data_sets() -> None:
    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            told.append((type(self).__name__, epoch))

    class ToldSampler(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append((type(self).__name__, epoch))

    class ToldBatches(BatchSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append((type(self).__name__, epoch))

    told: list[tuple[str, int]] = []
    numbers = Told(4)
    batches = ToldBatches(ToldSampler(numbers), batch_size=2, drop_last=False)
    loader = loader_of(numbers, batch_sampler=batches)
    micro_batches(prepare(loader), epoch=3)
    assert sorted(told) == [("Told", 3), ("ToldBatches", 3), ("ToldSampler", 3)]
    told.clear()
    list(prepare_evaluation(loader).batches(0))
    assert told == []


def test_the_global_generators_stay_untouched() -> None:
    for workers in (0, 2):
        loader = loader_of(Numbers(9), batch_size=2, shuffle=True, num_workers=workers)
        seed_host(3)
        before = save_host()
        micro_batches(prepare(loader))
        after = save_host()
        assert str(before[:2]) == str(after[:2])
        assert torch.equal(before[2], after[2])


def test_what_cannot_work_is_said_at_once() -> None:
    numbers = Numbers(6)
    distributed: Any = DistributedSampler(numbers, num_replicas=2, rank=0)
    with pytest.raises(ConfigError, match=r"`DistributedSampler`.*Remove it"):
        prepare(loader_of(numbers, sampler=distributed))
    inner = BatchSampler(distributed, 2, drop_last=False)
    with pytest.raises(ConfigError, match="Remove it"):
        prepare_evaluation(loader_of(numbers, batch_sampler=inner))
    with pytest.raises(ConfigError, match="a `Numbers`, is empty"):
        prepare(loader_of(Numbers(0)))
    with pytest.raises(ConfigError, match="3 is not a multiple of 2"):
        prepare(loader_of(numbers, batch_size=3), 0, 2, split_batches=True)
    message = "0 training steps per epoch: 3 samples, batch 4 x 2 processes, drop_last=True"
    with pytest.raises(ConfigError, match=message):
        prepare(loader_of(Numbers(3), batch_size=4, drop_last=True), 0, 2)
    with pytest.raises(ConfigError, match="`in_order=False`"):
        prepare(loader_of(numbers, num_workers=1, in_order=False))
    with pytest.raises(ConfigError, match="prepared already"):
        prepare(prepare(loader_of(numbers)))


def test_an_epoch_without_a_step_is_an_error() -> None:
    loader = loader_of(Numbers(0), batch_sampler=Buckets(0))
    with pytest.raises(ConfigError, match="is empty"):
        prepare(loader_of([], batch_sampler=[]))
    with pytest.raises(DataError, match="Epoch 2 of the training loader"):
        micro_batches(prepare(loader), epoch=2)
    few = prepare(loader_of(Numbers(3), batch_size=2))
    with pytest.raises(DataError, match="has no step"):
        micro_batches(few, accumulation=2, drop_last=True)


def test_evaluation_of_nothing_yields_nothing() -> None:
    empty = prepare_evaluation(loader_of(Numbers(0)))
    assert list(empty.batches(0)) == []
    assert len(empty) == 0


def test_lengths_are_known_where_the_samplers_are() -> None:
    prepared = prepare(loader_of(Numbers(11), batch_size=2), 0, 2)
    assert (len(prepared), prepared.samples_per_epoch, prepared.batch_size) == (3, 11, 2)
    custom = prepare(loader_of(Numbers(11), batch_sampler=Buckets(11)))
    assert custom.batch_size is custom.steps_per_epoch(1, drop_last=False) is None
    with pytest.raises(TypeError, match="not known ahead"):
        len(custom)


def test_keys_that_are_no_integers_are_kept() -> None:
    table = {"a": 1.0, "b": 2.0, "c": 3.0}
    keys: Any = ["c", "a", "b"]
    loader = loader_of(table, sampler=keys, batch_size=2)
    assert values(micro_batches(prepare(loader))) == [3.0, 1.0, 2.0]


def test_a_tensor_data_set_never_hands_out_its_own_memory() -> None:
    rows = torch.arange(6.0)
    prepared = prepare(loader_of(TensorDataset(rows), batch_size=6))
    for part in prepared.batches(0):
        part.data[0].zero_()
    assert torch.equal(rows, torch.arange(6.0))
