"""Several loaders as one: which samples each step has, on any split and from any position."""

import random
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate, chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, TensorDataset

from tests.data.toys import CPU, Buckets, Noisy, Numbers, Place, Stream, loader_of
from tests.helpers.tiers import with_few
from trainkit.data.combined import Combined, CombinedBatch, steps_of
from trainkit.data.prepare import training_loaders
from trainkit.errors import ConfigError, DataError

Steps = list[dict[str, list[int]]]
WEIGHTS = {"a": 2, "b": 0.5}
POLICIES = ("min", "max_cycle", "sequential", WEIGHTS)
SPLITS = [(1, 6), (1, 2), (1, 1), (2, 3), (2, 1), (3, 2), (3, 1)]  # processes, batch size


def prepare(loaders: Any, policy: Any, rank: int = 0, size: int = 1, **settings: Any) -> Any:
    place: Any = Place(rank, size)
    options = {"seed": 7, **settings}
    train = loaders if policy is None else Combined(loaders, policy)
    return training_loaders(train, processes=place, device=CPU, **options)


def two(a: int, b: int, batch: int, **options: Any) -> dict[str, DataLoader[Any]]:
    options.setdefault("shuffle", True)
    rows = {"a": TensorDataset(torch.arange(a)), "b": TensorDataset(torch.arange(b))}
    return {name: loader_of(data, batch_size=batch, **options) for name, data in rows.items()}


def read(loaders: Any, policy: Any, size: int = 1, epoch: int = 0, **where: Any) -> Steps:
    """Return the real samples of each step by loader, in the order of the whole job."""
    ranks = [prepare(loaders, policy, rank, size) for rank in range(size)]
    steps: Steps = []
    for windows in zip(*(rank.windows(epoch, **where) for rank in ranks), strict=True):
        steps.append({})
        for batches in zip(*windows, strict=True):
            assert len({batch.last for batch in batches}) == 1
            assert {batch.total for batch in batches} == {sum(batch.count for batch in batches)}
            for rank, batch in enumerate(batches):
                check(batch, rank)
                for name, part in batch.by_loader.items():
                    column = part.data[0] if isinstance(part.data, list) else part.data
                    found = column[: part.count].tolist()
                    steps[-1].setdefault(name, []).extend(found)
        assert [w.total for w in windows] == [sum(map(len, steps[-1].values()))] * size
    return steps


def check(batch: CombinedBatch, rank: int) -> None:
    parts = batch.by_loader.values()
    assert batch.data == {name: part.data for name, part in batch.by_loader.items()}
    assert batch.counts[rank] == batch.count == sum(part.count for part in parts)
    assert all(len(part.data) for part in parts)  # also where it counts for nothing


def samples(steps: Steps, name: str) -> list[int]:
    return list(chain(*(step.get(name, []) for step in steps)))


def test_min_ends_with_the_shortest_and_reads_no_sample_twice() -> None:
    steps = read(two(13, 29, 6), "min")
    assert len(steps) == 3
    assert sorted(samples(steps, "a")) == list(range(13))
    assert len(samples(steps, "b")) == len({*samples(steps, "b")}) == 18


def test_max_cycle_reads_the_longest_once_and_shuffles_each_pass_of_the_others() -> None:
    steps = read(two(13, 29, 6), "max_cycle")
    assert len(steps) == 5
    assert sorted(samples(steps, "b")) == list(range(29))
    first, second = samples(steps[:3], "a"), samples(steps[3:], "a")
    assert sorted(first) == list(range(13))
    assert len({*second}) == len(second) == 12
    assert second != first[:12]


def test_sequential_reads_each_sample_of_each_loader_once() -> None:
    steps = read(two(13, 29, 6), "sequential")
    assert [list(step) for step in steps] == 3 * [["a"]] + 5 * [["b"]]
    assert sorted(samples(steps, "a")) == list(range(13))
    assert sorted(samples(steps, "b")) == list(range(29))


def test_weights_share_out_as_many_steps_as_all_have_together() -> None:
    steps = read(two(13, 29, 6), WEIGHTS)
    assert "".join(*zip(*(tuple(step) for step in steps), strict=True)) == "aabaaaab"
    assert sorted(samples(steps, "a")[:13]) == list(range(13))


def test_two_loaders_over_the_same_data_are_shuffled_apart_and_anew_each_epoch() -> None:
    data = Numbers(24)
    loader = loader_of(data, batch_size=24, shuffle=True)
    ((first,), (second,)) = (read({"a": loader, "b": loader}, "min", epoch=e) for e in (0, 1))
    orders = [first["a"], first["b"], second["a"], second["b"]]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def test_samples_draw_under_keys_of_their_loader() -> None:
    loader = loader_of(Noisy(), batch_size=12)
    apart = loader_of(Noisy(), batch_size=12, num_workers=1)
    found = []
    for each in (loader, apart):
        for window in prepare({"a": each, "b": each}, "min").windows(3):
            found += [batch.data for batch in window]
    assert all(found[0][name].equal(found[1][name]) for name in "ab")
    assert not found[0]["a"].equal(found[0]["b"])


def test_data_sets_hear_of_the_epoch_and_of_each_later_pass_in_it() -> None:
    heard: dict[str, list[int]] = {"a": [], "b": []}

    class Listens(Numbers):
        name = ""

        def set_epoch(self, epoch: int) -> None:
            heard[self.name].append(epoch)

    loaders = two(13, 29, 6)
    for name, length in (("a", 13), ("b", 29)):
        data = Listens(length)
        data.name = name
        loaders[name] = loader_of(data, batch_size=6, num_workers=0)
    combined = prepare(loaders, "max_cycle")
    for epoch in (0, 1):
        assert len(list(combined.windows(epoch))) == 5
    assert heard == {"a": [0, 100_000, 1, 100_001], "b": [0, 1]}


@pytest.mark.parametrize("first", with_few([0], range(0, 32, 8)))
def test_any_split_has_the_same_steps_from_any_position(first: int) -> None:
    for seed in range(first, first + 8):
        chance = random.Random(seed)
        policy: Any = chance.choice(POLICIES)
        lengths = chance.randint(6, 40), chance.randint(6, 40)
        shuffle, epoch, drop = chance.random() < 0.8, chance.randint(0, 3), chance.random() < 0.3
        where = {"epoch": epoch, "drop_last": drop}
        expected = read(two(*lengths, 6, shuffle=shuffle), policy, **where)
        ends = [0, *accumulate(sum(map(len, step.values())) for step in expected)]
        for size, batch in SPLITS:
            loaders = two(*lengths, batch, shuffle=shuffle)
            where |= {"accumulation": 6 // (size * batch)}
            assert read(loaders, policy, size, **where) == expected, seed
            number = chance.randint(0, len(expected))
            tail = read(loaders, policy, size, position=ends[number], **where)
            assert tail == expected[number:], (seed, number)


SMALL: Any = loader_of(Numbers(3), batch_size=4, drop_last=True)
EMPTY: Any = DataLoader(TensorDataset(torch.zeros(0, 1)))


@pytest.mark.parametrize("policy", ["min", "max_cycle"])
def test_what_is_repeated_is_the_same_from_any_position(policy: str) -> None:
    for size, accumulation in ((2, 1), (3, 1), (3, 2)):
        for rank in range(size):
            combined = prepare(two(13, 16, 2), policy, rank, size)
            given = {"accumulation": accumulation}
            whole = [[batch.data for batch in each] for each in combined.windows(0, **given)]
            position = 0
            for number, window in enumerate(combined.windows(0, **given)):
                again = [
                    [batch.data for batch in each]
                    for each in prepare(two(13, 16, 2), policy, rank, size).windows(
                        0, position=position, **given
                    )
                ]
                assert str(again) == str(whole[number:]), (size, rank, number)
                position += window.total


class Sized(Buckets):
    def __len__(self) -> int:
        return sum(1 for _ in self)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_of_any_size_are_read_from_any_position(size: int, policy: Any) -> None:
    def loaders() -> dict[str, Any]:
        return {
            "a": loader_of(Numbers(15), batch_sampler=Sized(15)),
            "b": loader_of(Numbers(23), batch_size=2, shuffle=True),
        }

    steps = read(loaders(), policy, size, accumulation=2)
    position = 0
    for number, step in enumerate(steps):
        tail = read(loaders(), policy, size, accumulation=2, position=position)
        assert tail == steps[number:]
        position += sum(map(len, step.values()))


def test_a_position_in_the_middle_of_a_step_is_refused() -> None:
    combined = prepare(two(13, 29, 6), "min")
    for position in (5, 1000):
        with pytest.raises(DataError, match="no step of the combined loaders begins there"):
            next(combined.windows(0, position=position))


def test_a_limit_is_that_of_each_loader() -> None:
    for limit, lengths in ((2, (2, 2)), (0.5, (1, 2))):
        combined = prepare(two(13, 29, 6), "sequential")
        combined.limit_to(limit)
        assert combined.steps_per_epoch(1, False) == sum(lengths)
        assert len(list(combined.windows(0))) == sum(lengths)


def test_the_order_is_known_by_its_first_passes_wherever_it_is_asked() -> None:
    combined = prepare(two(13, 29, 6), "max_cycle")
    digest = combined.order_digest(0, 1)
    for _ in combined.windows(0):
        assert combined.order_digest(0, 1) == digest
    assert combined.order_digest(1, 1) != digest
    assert prepare(two(13, 29, 3), "max_cycle", 0, 2).order_digest(0, 1) == digest


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 50) | st.sampled_from([0.1, 0.25, 1.5]), min_size=2, max_size=5),
    st.integers(1, 400),
)
def test_each_loader_has_its_share_of_any_number_of_steps(weights: list[float], most: int) -> None:
    policy = {str(number): weight for number, weight in enumerate(weights)}
    exact = {name: Fraction(str(weight)) for name, weight in policy.items()}
    taken: Counter[str] = Counter()
    drawn = islice(steps_of(policy, dict.fromkeys(policy, 400)), most)
    for step, (name,) in enumerate(drawn, start=1):
        taken[name] += 1
        shares = {each: weight * step / sum(exact.values()) for each, weight in exact.items()}
        late = {each: share - taken[each] for each, share in shares.items()}
        assert all(-1 < by < len(weights) - 1 for by in late.values())
        if all(share.denominator == 1 for share in shares.values()):
            assert set(late.values()) == {0}


@pytest.mark.parametrize(
    ("loaders", "policy", "words"),
    [
        (two(4, 4, 2), None, '"min", "max_cycle", "sequential", or weights'),
        (two(4, 4, 2), "mim", "Did you mean `min`"),
        (two(4, 4, 2), 3, "`policy` must be"),
        (two(4, 4, 2), ["min"], "`policy` must be"),
        (two(4, 4, 2), {}, "`policy` must be those of the training loaders"),
        (two(4, 4, 2), {"a": 1}, "are of `a`"),
        (two(4, 4, 2), {"a": 1, "b": 1, "c": 1}, "of the training loaders, `a`, `b`, but"),
        (two(4, 4, 2), {"a": 1, "b": 0}, "loader `b` must be a finite number above 0, but is 0"),
        (two(4, 4, 2), {"a": -1, "b": 1}, "but is -1"),
        (two(4, 4, 2), {"a": True, "b": 1}, "but is True"),
        (two(4, 4, 2), {"a": float("nan"), "b": 1}, "but is nan"),
        (two(4, 4, 2), {"a": "3", "b": 1}, "but is '3'"),
        ({"a": two(4, 4, 2)["a"]}, "min", "Pass a single loader itself"),
        ({}, "min", "a mapping of 0"),
        (two(4, 4, 2)["a"], "min", "a mapping from names to training loaders"),
        ({"loss": two(4, 4, 2)["a"], "b": two(4, 4, 2)["b"]}, "min", "one is 'loss'"),
        ({"a/b": two(4, 4, 2)["a"], "b": two(4, 4, 2)["b"]}, "min", "one is 'a/b'"),
        ({1: two(4, 4, 2)["a"], "b": two(4, 4, 2)["b"]}, "min", "one is 1"),
        ({**two(4, 4, 2), "b": EMPTY}, "min", "`b`: The training data"),
        (
            {**two(4, 4, 2), "b": loader_of(Numbers(3), batch_size=4, drop_last=True)},
            "min",
            "`b`: 0",
        ),
        ({**two(4, 4, 2), "b": loader_of(Stream(4))}, "min", "`b`: Loaders are combined by how"),
        ({**two(4, 4, 2), "b": loader_of(Numbers(4), batch_size=None)}, "min", "`b`: Loaders are"),
        ({**two(4, 4, 2), "b": [1, 2]}, "min", "`b`: Loaders are combined by how"),
        ({**two(4, 4, 2), "b": 5}, "min", "`b`: A loader must be"),
    ],
)
def test_what_cannot_be_combined_is_refused(loaders: Any, policy: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(loaders, policy)
    assert words in str(caught.value)


def test_other_ways_to_put_loaders_together_are_answered_by_the_line_to_write() -> None:
    class CombinedLoader:
        def __init__(self, iterables: Mapping[str, Any], mode: str) -> None:
            self.iterables, self._mode = iterables, mode

    parts = two(4, 4, 2)
    cycle = CombinedLoader({"x": 1, "y": 2}, "max_size_cycle")
    for other, line in (
        (cycle, 'Combined({"x": loader_x, "y": loader_y}, "max_cycle"))`'),
        (zip(*parts.values(), strict=False), '"b": loader_b}, "min"))`'),
        ([*parts.values()], ', "max_cycle")'),
    ):
        for size in (1, 2):
            with pytest.raises(ConfigError) as caught:
                prepare(other, None, 0, size)
            assert line in str(caught.value)
