"""How batches are fetched, and under which keys (rules 12, 13, 18)."""

import random
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from tests.data.toys import Noisy, Numbers, loader_of, micro_batches, prepare, prepare_evaluation
from trainkit.basics.rng import restore_host, sample_seed, save_host, seed_host
from trainkit.data import PreparedLoader


class Rows(Dataset[Any]):
    """Hands out whole batches, and counts how often it is asked."""

    def __init__(self, length: int = 9) -> None:
        self.length = length
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("A data set that hands out batches is not asked for samples.")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [(index, random.random()) for index in indices]


def _by_index(loader: PreparedLoader, epoch: int = 0, position: int = 0) -> dict[int, list[float]]:
    rows: dict[int, list[float]] = {}
    for part in loader.batches(epoch, position=position):
        for row in part.data[: part.count].tolist():
            rows[int(row[0])] = row[:4]
    return rows


def test_augmentation_depends_on_seed_epoch_and_index_only() -> None:
    expected = _by_index(prepare(loader_of(Noisy(), batch_size=4, shuffle=True)))
    for workers in (0, 2):
        for size in (1, 2, 3):
            found = {}
            loader = loader_of(
                Noisy(), batch_size=12 // size // 2, shuffle=True, num_workers=workers
            )
            for rank in range(size):
                seed_host(rank)
                found.update(_by_index(prepare(loader, rank, size)))
            assert found == expected
    loader = loader_of(Noisy(), batch_size=4, shuffle=True)
    resumed = _by_index(prepare(loader), position=8)
    assert resumed == {index: expected[index] for index in resumed}
    assert len(resumed) == 4
    assert _by_index(prepare(loader), epoch=1)[0] != expected[0]


class NoisyBatches(Noisy):
    """The same, fetched a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_augmentation_of_batches_fetched_at_once_depends_on_their_samples_too() -> None:
    def found(batch_size: int, size: int = 1, workers: int = 0, **where: Any) -> dict[int, Any]:
        rows: dict[int, Any] = {}
        loader = loader_of(NoisyBatches(), batch_size=batch_size, num_workers=workers)
        for rank in range(size):
            seed_host(rank)
            rows |= _by_index(prepare(loader, rank, size), **where)
        return rows

    expected = found(2)
    assert expected == found(2, workers=2) == found(2, size=2) == found(2, size=3)
    resumed = found(2, position=8)
    assert resumed == {index: expected[index] for index in range(8, 12)}
    others = found(4)
    firsts = range(0, 12, 4)  # what a batch draws first is that of its first sample
    assert [expected[index] for index in firsts] == [others[index] for index in firsts]
    assert expected != others
    single = _by_index(prepare(loader_of(Noisy(), batch_size=5)))
    assert single == _by_index(prepare(loader_of(Noisy(), batch_size=3)))


def test_the_key_of_a_sample_is_public() -> None:
    found = _by_index(prepare(loader_of(Noisy(), batch_size=5)), epoch=2)
    state = save_host()
    for index, row in found.items():
        seed_host(sample_seed(7, 2, index))
        assert Noisy()[index].tolist()[:4] == row
    restore_host(state)


def test_the_index_of_a_subset_is_the_outer_one() -> None:
    subset = Subset(Subset(Noisy(), [9, 8, 7, 6]), [3, 1])
    found = _by_index(prepare(loader_of(subset, batch_size=2)), epoch=2)
    state = save_host()
    seed_host(sample_seed(7, 2, 0))
    assert found[6] == subset[0].tolist()[:4]
    restore_host(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_drawn_and_put_back_is_drawn_under_keys_too(workers: int) -> None:
    class Forking(Numbers):
        def __getitem__(self, index: int) -> Any:
            with torch.random.fork_rng(devices=[]):
                return torch.rand(1, dtype=torch.float64)

    drawn = torch.cat(list(prepare(loader_of(Forking(160), batch_size=8, num_workers=workers))))
    assert len(set(drawn.flatten().tolist())) == 160


@pytest.mark.parametrize("workers", [0, 1])
def test_the_global_generators_are_put_back(workers: int) -> None:
    seed_host(3)
    before = save_host()
    for _ in prepare(loader_of(Noisy(), batch_size=2, shuffle=True, num_workers=workers)):
        after = save_host()
        assert str(before[:2]) == str(after[:2])
        assert torch.equal(before[2], after[2])


def test_sample_seeding_can_be_left_out() -> None:
    def first_draw(seed: int) -> float:
        seed_host(seed)
        (batch,) = prepare(loader_of(Noisy(1)), sample_seeding=False)
        return float(batch[0, 1])

    assert first_draw(1) == first_draw(1)
    assert first_draw(1) != first_draw(2)


def test_a_collator_that_draws_has_the_key_of_its_first_sample() -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack(samples), random.random()

    batches = list(prepare(loader_of(Numbers(4), batch_size=2, collate_fn=collate)))
    for index, (_, drawn) in zip((0, 2), batches, strict=True):
        assert drawn == random.Random(sample_seed(7, 0, index)).random()


def test_a_data_set_that_hands_out_batches_is_asked_once_a_batch() -> None:
    rows = Rows()
    parts = micro_batches(prepare(loader_of(rows, batch_size=4)))
    assert rows.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    drawn = random.Random(sample_seed(7, 0, 4)).random()
    assert float(parts[1].data[1][0]) == drawn
    rows.asked.clear()
    micro_batches(prepare(loader_of(Subset(rows, [8, 3, 1]), batch_size=2)))
    assert rows.asked == [[8, 3], [1]]


def test_a_stack_of_single_samples_is_no_batch_fetch() -> None:
    stacked = StackDataset(Noisy(), Noisy())
    parts = micro_batches(prepare(loader_of(stacked, batch_size=3)))
    state = save_host()
    seed_host(sample_seed(7, 0, 4))
    expected = stacked[4]
    restore_host(state)
    assert torch.equal(parts[1].data[0][1, :4], expected[0][:4])
    assert torch.equal(parts[1].data[1][1, :4], expected[1][:4])


def test_the_rows_of_tensors_are_those_of_default_collate() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.rand(9, 3, generator=generator),
        torch.arange(9, dtype=torch.int16),
        torch.rand(9, 2, 2, generator=generator).to(torch.bfloat16),
        torch.arange(9) > 4,
    ]
    data = TensorDataset(*tensors)
    for dataset in (data, Subset(data, [8, 0, 4, 4, 2])):
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for workers in (0, 1):
            loader = loader_of(dataset, sampler=order, batch_size=2, num_workers=workers)
            for start, batch in zip(range(0, 9, 2), prepare(loader), strict=False):
                expected = default_collate([dataset[i] for i in order[start : start + 2]])
                assert type(batch) is type(expected)
                assert [part.dtype for part in batch] == [part.dtype for part in expected]
                assert all(map(torch.equal, batch, expected))


def test_silent_data_sets_leave_the_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(value: int) -> None:
        raise AssertionError(f"seeded with {value}")

    rows = TensorDataset(torch.arange(4.0))
    numbers: Any = [1, 2]
    silent: list[Any] = [numbers, rows, Subset(numbers, [0]), ConcatDataset([rows, rows])]
    for dataset in silent:
        prepared = prepare_evaluation(loader_of(dataset, batch_size=2))
        parts = prepared.batches(0)
        with monkeypatch.context() as patch:
            patch.setattr("trainkit.basics.rng.seed_host", fail)
            assert list(parts)


class Broken(Numbers):
    """Raises at sample 5."""

    def __init__(self, error: Exception) -> None:
        super().__init__(8)
        self.error = error

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise self.error
        return super().__getitem__(index)


class OddError(Exception):
    """Cannot be made from a message."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code, reason)


def _local_error() -> Exception:
    class LocalError(Exception):
        """Cannot be found by name."""

    return LocalError("here")


class MessageError(Exception):
    """Has what torch takes for a keyword."""

    message = "always the same"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("bad"),
        StopIteration("bad"),
        OddError(3, reason="bad"),
        _local_error(),
        MessageError("bad"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_names_the_sample(workers: int, error: Exception) -> None:
    loader = prepare(loader_of(Broken(error), batch_size=2, num_workers=workers))
    parts = loader.batches(3)
    assert [next(parts).data.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any, by the parameter
        next(parts)
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "at sample 5 of the data set `Broken`, epoch 3." in text
    if workers == 0 and not isinstance(error, StopIteration):
        assert caught.value is error


def _bad_collate(samples: list[Any]) -> Any:
    raise ValueError("no batch")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_collator_names_the_samples(workers: int) -> None:
    loader = loader_of(Numbers(8), batch_size=2, collate_fn=_bad_collate, num_workers=workers)
    with pytest.raises(ValueError, match="no batch") as caught:
        list(prepare(loader))
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "while `_bad_collate` made a batch of the samples [0, 1] of the data set `Num" in text


def test_an_index_out_of_range_names_the_samples() -> None:
    loader = loader_of(TensorDataset(torch.arange(4)), sampler=[1, 9], batch_size=2)
    with pytest.raises(IndexError) as caught:
        list(prepare(loader))
    assert "the samples [1, 9] of the data set `TensorDataset`" in caught.value.__notes__[0]
