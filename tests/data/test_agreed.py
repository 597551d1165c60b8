"""Streams, keys of whole batches, foreign loaders: counts that are agreed on (rule 17)."""

import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.data.toys import (
    CPU,
    Noisy,
    Numbers,
    Stream,
    loader_of,
    micro_batches,
    prepare,
    prepare_evaluation,
    values,
)
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from trainkit.data import (
    ActiveLoaders,
    MicroBatch,
    PreparedLoader,
    evaluation_loader,
    presharded,
    training_loader,
)
from trainkit.distributed.processes import Processes
from trainkit.errors import ConfigError, DataError

LENGTHS = (1, 2, 5, 7, 16, 33)

Told = tuple[list[Any], int, int, int, bool]


def _told(part: MicroBatch) -> Told:
    return values([part]), len(part.data), part.count, part.total, part.last


def _train(loader: Any, **settings: Any) -> PreparedLoader:
    return training_loader(
        loader, processes=Processes.start(device=CPU), device=CPU, seed=7, **settings
    )


def _evaluate(loader: Any) -> PreparedLoader:
    return evaluation_loader(loader, processes=Processes.start(device=CPU), device=CPU, seed=7)


def _rounds(ranks: list[list[Told]]) -> list[list[Any]]:
    """Return the real samples of each round, in the order of the processes."""
    for parts in zip(*ranks, strict=True):
        assert {part[3] for part in parts} == {sum(part[2] for part in parts)}
        assert all(part[1] > 0 for part in parts)
    return [[v for part in parts for v in part[0]] for parts in zip(*ranks, strict=True)]


def _read_streams(rank: int, workers: int) -> list[list[Told]]:
    loaders = [loader_of(Stream(length), batch_size=2, num_workers=workers) for length in LENGTHS]
    return [[_told(part) for part in micro_batches(_train(loader), 1)] for loader in loaders]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", with_few([3], [1, 3]))
def test_a_stream_is_used_once_whoever_reads_it(size: int, workers: int) -> None:
    ranks = run_ranks(size, _read_streams, workers)
    for case, length in enumerate(LENGTHS):
        seen = [v for parts in _rounds([told[case] for told in ranks]) for v in parts]
        assert seen == list(range(length))


def _read_noise(rank: int, workers: int, batch_size: int) -> list[list[float]]:
    loader = loader_of(
        Stream(12), batch_size=batch_size, num_workers=workers, persistent_workers=workers > 0
    )
    prepared = _train(loader)
    random.seed(rank)
    rows: list[list[float]] = []
    for epoch in (0, 3):
        state = random.getstate()
        for part in micro_batches(prepared, epoch):
            rows += part.data[: part.count].tolist()
        assert random.getstate() == state
    prepared.close()
    return rows


@pytest.mark.e2e
def test_a_streams_noise_and_epoch_do_not_depend_on_readers() -> None:
    (expected,) = run_ranks(1, _read_noise, 0, 6)
    assert {row[2] for row in expected} == {0, 3}
    assert len({row[1] for row in expected}) == 24
    for size in (1, 2, 3):
        for workers in (0, 2):
            ranks = run_ranks(size, _read_noise, workers, 6 // size)
            assert sorted(row for rows in ranks for row in rows) == sorted(expected)


def test_a_stream_goes_on_at_a_position_and_says_that_it_reads_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for workers in (0, 2):
        loader = loader_of(Stream(11), batch_size=2, num_workers=workers)
        whole = [part.data.tolist() for part in micro_batches(prepare(loader), 2)]
        with caplog.at_level(logging.WARNING):
            rest = [part.data.tolist() for part in micro_batches(prepare(loader), 2, position=4)]
        assert rest == whole[2:]
        assert "the first 4 samples of epoch 2 are read again" in caplog.text
        with pytest.raises(DataError, match="position is 12"):
            micro_batches(prepare(loader), 2, position=12)


def _resume_at_the_end(rank: int) -> list[list[Told]]:
    stream = loader_of(Stream(5), batch_size=2)
    keys = loader_of(_Blocks(), sampler=[[0, 1], [2, 3], [4, 5]], batch_size=None)
    shares = presharded([torch.arange(2), torch.arange(2)][: 2 - rank])
    empty = loader_of(_Blocks(), sampler=[[0, 1], [], [4, 5], []], batch_size=None)
    where = ((stream, 4), (keys, 4), (shares, 4), (empty, 2))
    return [[_told(p) for p in micro_batches(_train(one), position=at)] for one, at in where]


class _Blocks:
    """Hands out a block of rows for a list of indices."""

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


def test_a_process_without_samples_after_a_resume_has_something_to_repeat() -> None:
    first, second = run_ranks(2, _resume_at_the_end)
    assert first == [
        [([4], 1, 1, 1, True)],
        [([4, 5], 2, 2, 2, True)],
        [([0, 1], 2, 2, 2, True)],
        [([4, 5], 2, 2, 2, True)],
    ]
    assert second == [
        [([], 2, 0, 1, True)],
        [([], 2, 0, 2, True)],
        [([], 2, 0, 2, True)],
        [([], 2, 0, 2, True)],
    ]


def test_windows_of_a_stream_end_with_it() -> None:
    prepared = prepare(loader_of(Stream(9), batch_size=2))
    windows = list(map(list, prepared.windows(0, accumulation=2)))
    assert [[p.last for p in parts] for parts in windows] == [[False, True], [False, True], [True]]
    full = [(w.total, w.size) for w in prepared.windows(0, accumulation=2, drop_last=True)]
    assert full == [(4, 2), (4, 2)]
    firsts = [int(next(iter(w)).data[0, 0]) for w in prepared.windows(0, accumulation=2)]
    assert firsts == [0, 4, 8]


def _read_dropping(rank: int) -> list[list[Told]]:
    loader = loader_of(Stream(11), batch_size=2, drop_last=True)
    training = [_told(part) for part in micro_batches(_train(loader))]
    return [training, [_told(part) for part in _evaluate(loader).batches(0)]]


def test_drop_last_of_a_stream() -> None:
    ranks = run_ranks(3, _read_dropping)
    assert [v for parts in _rounds([told[0] for told in ranks]) for v in parts] == list(range(6))
    assert [v for parts in _rounds([told[1] for told in ranks]) for v in parts] == list(range(10))


class Sharded(IterableDataset[Any]):
    """Hands out shards by itself."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor(number) for number in self.numbers)

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.numbers[index::num_shards])


def _read_shards(rank: int) -> list[Any]:
    parts = micro_batches(_train(loader_of(Sharded(list(range(9))), batch_size=2, num_workers=1)))
    few = _train(loader_of(Sharded([0, 1]), batch_size=2))
    with pytest.raises(DataError, match=r"Process 2 has no batch.*as many shards") as caught:
        micro_batches(few)
    return [[_told(part) for part in parts], str(caught.value)]


def test_a_stream_that_can_shard_is_asked_to() -> None:
    ranks = run_ranks(3, _read_shards)
    assert _rounds([parts for parts, _ in ranks]) == [[0, 3, 1, 4, 2, 5], [6, 7, 8]]
    assert len({message for _, message in ranks}) == 1


def test_a_stream_may_yield_batches_itself() -> None:
    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for size in (3, 1, 2):
                yield torch.full((size,), size)

    prepared = prepare(loader_of(Batches(), batch_size=None))
    assert [part.count for part in micro_batches(prepared)] == [3, 1, 2]
    assert [part.count for part in micro_batches(prepared, position=4)] == [2]
    assert prepared.nominal_window(2) is None


def _read_batches_of_stream(rank: int, workers: int) -> list[Told]:
    class Batches(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for size in (3, 1, 2, 4, 1):
                yield torch.full((size,), size)

    loader = loader_of(Batches(), batch_size=None, num_workers=workers)
    return [_told(part) for part in micro_batches(_train(loader))]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_stream_are_shared_out(workers: int) -> None:
    ranks = run_ranks(2, _read_batches_of_stream, workers)
    assert _rounds(ranks) == [[3, 3, 3, 1], [2, 2, 4, 4, 4, 4], [1]]


def _read_keys(rank: int, workers: int) -> list[Told]:
    keys = [[0, 1, 2], [3], [4, 5]]
    loader = loader_of(_Blocks(), sampler=keys, batch_size=None, num_workers=workers)
    return [_told(part) for part in micro_batches(_train(loader))]


@pytest.mark.parametrize("workers", [0, 2])
def test_keys_of_whole_batches_are_shared_out(workers: int) -> None:
    assert _rounds(run_ranks(2, _read_keys, workers)) == [[0, 1, 2, 3], [4, 5]]


def _read_own_shares(rank: int) -> list[Told]:
    batches = [torch.arange(3) + 10 * rank] * (rank + 1)
    return [_told(part) for part in micro_batches(_train(presharded(batches)))]


@pytest.mark.e2e
def test_presharded_loaders_may_differ_in_length() -> None:
    assert _rounds(run_ranks(2, _read_own_shares)) == [[0, 1, 2, 10, 11, 12], [10, 11, 12]]


def _refused_elsewhere(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        _train([torch.arange(3)])
    return str(caught.value)


def test_a_foreign_loader_runs_on_one_process() -> None:
    batches = [torch.arange(3), torch.arange(2)]
    prepared = prepare(batches)
    assert [part.count for part in micro_batches(prepared)] == [3, 2]
    assert len(prepared) == 2
    texts: Any = [{"text": ["a", "b"], "label": [1, 2]}]
    assert [part.count for part in micro_batches(prepare(texts))] == [2]
    message = run_ranks(2, _refused_elsewhere)[0]
    assert "a `list`, is not a plain `DataLoader`" in message
    assert "`trainkit.data.presharded`" in message


def test_a_loader_with_an_iterator_of_its_own_is_left_to_it() -> None:
    class Twice(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch * 2

    prepared = prepare(Twice(Numbers(4), batch_size=2, shuffle=True))
    random_state = torch.get_rng_state()
    found = values(micro_batches(prepared))
    assert sorted(found) == [0, 2, 4, 6]
    assert found == values(micro_batches(prepared))
    assert torch.equal(torch.get_rng_state(), random_state)


def test_what_cannot_be_counted_is_said() -> None:
    with pytest.raises(DataError, match="number of samples in a batch of type `float`"):
        micro_batches(prepare([1.0]))
    with pytest.raises(ConfigError, match="but is a `int`"):
        prepare(3)
    with pytest.raises(ConfigError, match="a `list`, is empty"):
        prepare([])
    with pytest.raises(ConfigError, match="`batch_size=None`"):
        prepare(loader_of(_Blocks(), sampler=[[0]], batch_size=None), split_batches=True)
    with pytest.raises(ConfigError, match="`batch_size=None`"):
        prepare(loader_of(Stream(4), batch_size=None), split_batches=True)


def test_a_used_up_loader_is_an_error_in_training() -> None:
    prepared = prepare(iter([torch.arange(3)]))
    assert len(micro_batches(prepared)) == 1
    with pytest.raises(DataError, match="Epoch 1 of the training loader"):
        micro_batches(prepared, 1)
    assert list(prepare_evaluation(loader_of(Stream(0))).batches(0)) == []


class Failing(IterableDataset[Any]):
    """Raises at sample 5."""

    def __iter__(self) -> Iterator[Any]:
        yield from map(torch.tensor, range(5))
        raise ValueError("bad")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_stream_is_raised_when_its_batch_is_due(workers: int) -> None:
    parts = prepare(loader_of(Failing(), batch_size=2, num_workers=workers)).batches(3)
    assert [next(parts).data.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="bad") as caught:
        next(parts)
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "Raised at sample 5 of the stream `Failing`, epoch 3." in text


def _fail_alone(rank: int) -> int:
    def share() -> Iterator[torch.Tensor]:
        yield torch.arange(2)
        if rank == 1:
            raise ValueError("bad")
        yield torch.arange(2)

    count = 0
    for _ in _train(presharded(share())).windows(0):
        count += 1
    return count


def test_an_error_on_one_process_ends_all() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, _fail_alone)
    assert "Process 1 could not read its next batch" in caught.value.failures[0]
    assert "ValueError: bad" in caught.value.failures[1]


def test_active_loaders_hear_of_streams() -> None:
    active = ActiveLoaders()
    loader = loader_of(Stream(5), batch_size=2)
    seen = []
    for _ in prepare_evaluation(loader, active=active):
        info = active.current(loader)
        assert info is not None
        seen.append((info.counts, info.local_size))
    assert seen == [((2,), 2), ((2,), 2), ((1,), 1)]


def test_sample_seeding_of_keys_of_batches() -> None:
    loader = loader_of(Noisy(4), sampler=[2, 0], batch_size=None)
    first = [batch.tolist() for batch in prepare(loader)]
    random.seed(1)
    assert [batch.tolist() for batch in prepare(loader)] == first
