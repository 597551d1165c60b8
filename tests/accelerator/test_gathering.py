"""What `gather_for_metrics` cuts off in loops of the user's own (rule 19)."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.distributed.gather_cases import COLLATES, ONE_EACH, same
from tests.helpers.ranks import run_ranks
from trainkit import Accelerator, DataLoaderConfiguration, skip_first_batches
from trainkit.errors import ConfigError, DataError


def _loader(length: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(length)), batch_size)


def _numbers(found: Any) -> list[int]:
    values: list[int] = found.flatten().tolist()
    return values


def _texts_before(rank: int) -> Any:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(_loader(8, 2))
    texts = pairs = None
    for (batch,) in loader:
        texts = accelerator.gather_for_metrics([str(int(number)) for number in batch])
        pairs = accelerator.gather_for_metrics((batch, batch + 10))
    return texts, [_numbers(part) for part in pairs or ()]


def test_a_pair_after_a_list_of_texts_is_a_pair() -> None:
    expected = (list("4567"), [[4, 5, 6, 7], [14, 15, 16, 17]])
    assert run_ranks(2, _texts_before) == [expected] * 2


def _after_the_loop(rank: int) -> Any:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(_loader(6, 2))
    inside, kept = [], []
    for (batch,) in loader:
        inside += _numbers(accelerator.gather_for_metrics(batch))
        kept.append(batch)
    own = torch.tensor([10 * rank, 1, 2, 3])
    after = accelerator.gather_for_metrics({"own": own, "texts": [f"r{rank}"]})
    everything = accelerator.gather_for_metrics(torch.cat(kept))
    with pytest.raises(ConfigError, match="has no batch under way"):
        accelerator.gather_for_metrics(own, loader=loader)
    return inside, _numbers(after["own"]), after["texts"], _numbers(everything)


@pytest.mark.e2e
def test_after_a_loop_everything_is_gathered() -> None:
    # The last two are what filled process 1's last batch up.
    everything = [0, 1, 4, 5, 2, 3, 0, 1]
    expected = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 10, 1, 2, 3], ["r0", "r1"], everything)
    assert run_ranks(2, _after_the_loop) == [expected] * 2


def _nested(rank: int, same: bool) -> Any:
    accelerator = Accelerator(cpu=True)
    outer, other = accelerator.prepare(_loader(12, 2), _loader(5, 2))
    inner = outer if same else other
    found = []
    for step, (batch,) in enumerate(outer):
        found.append(_numbers(accelerator.gather_for_metrics(batch)))
        for number, (inside,) in enumerate(inner):
            found.append(_numbers(accelerator.gather_for_metrics(inside)))
            if step == 1 and number == 0:
                break  # the outer batch is meant again
        found.append(_numbers(accelerator.gather_for_metrics(batch)))
    return found


@pytest.mark.parametrize("same", [False, True])
def test_an_evaluation_inside_an_epoch_is_gathered_by_its_own_loader(same: bool) -> None:
    def rounds(length: int) -> list[list[int]]:
        return [list(range(i, min(i + 4, length))) for i in range(0, length, 4)]

    inner = rounds(12 if same else 5)
    first, second, third = rounds(12)
    expected = [first, *inner, first, second, inner[0], second, third, *inner, third]
    assert run_ranks(2, _nested, same) == [expected] * 2


def _in_turns(rank: int) -> Any:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(_loader(8, 2), _loader(7, 2))
    found, refused = [], ""
    for (one,), (two,) in zip(first, second, strict=True):
        for value, loader in ((one, first), (two, second), (two, None)):
            try:
                found.append(_numbers(accelerator.gather_for_metrics(value, loader=loader)))
            except DataError as error:
                refused = str(error)
    return found, refused


@pytest.mark.e2e
def test_of_two_loaders_in_turns_the_last_is_meant_unless_both_may_be() -> None:
    for found, refused in run_ranks(2, _in_turns):
        assert found == [[0, 1, 2, 3]] * 3 + [[4, 5, 6, 7], [4, 5, 6]]
        assert "Two loaders yield in turns" in refused
        assert "`loader=`" in refused


def _again_and_again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _first_round(rank: int) -> list[Any]:
    """Return what is gathered of a first round, or why it is refused."""
    accelerator = Accelerator(cpu=True)
    long, short = accelerator.prepare(_loader(8, 2), _loader(3, 2))
    found: list[Any] = []

    def gather(value: Any) -> None:
        try:
            found.append(_numbers(accelerator.gather_for_metrics(value)))
        except DataError as error:
            found.append("refused" if "Two loaders yield in turns" in str(error) else str(error))

    for (one,), _ in zip(long, short, strict=False):
        gather(one)
    for (one,), _ in zip(short, skip_first_batches(long, 1), strict=False):
        gather(one)
    for (one,), _ in zip(long, _again_and_again(short), strict=False):
        gather(one)
    for (_,) in long:  # an evaluation inside an epoch is no such thing
        for (one,) in short:
            gather(one)
    return found


@pytest.mark.e2e
def test_the_first_round_of_two_loaders_in_turns_is_refused_as_well() -> None:
    # Nothing tells the first round of a generator around a loader from an evaluation in an epoch.
    expected = ["refused", "refused", [0, 1, 2], "refused", [0, 1, 2], [0, 1, 2]]
    assert run_ranks(2, _first_round) == [expected] * 2


def _held(rank: int) -> Any:
    accelerator = Accelerator(cpu=True)
    train, evaluation = accelerator.prepare(_loader(16, 4), _loader(7, 2))
    batches: Iterator[Any] = iter(evaluation)
    found = []
    for (batch,) in train:
        (two,) = next(batches)
        found.append(_numbers(accelerator.gather_for_metrics(two)))
        with pytest.raises(DataError, match=r"the batch has 2 samples.*`loader=` says whose"):
            accelerator.gather_for_metrics(batch)
        found.append(_numbers(accelerator.gather_for_metrics(batch, loader=train)))
    del batches
    skipped = skip_first_batches(train, 1)
    for (batch,) in skipped:
        found.append(_numbers(accelerator.gather_for_metrics(batch, loader=skipped)))
    return found


@pytest.mark.e2e
def test_an_iterator_that_is_drawn_from_now_and_then_is_meant_when_it_yielded_last() -> None:
    expected = [[0, 1, 2, 3], list(range(8)), [4, 5, 6], list(range(8, 16)), list(range(8, 16))]
    assert run_ranks(2, _held) == [expected] * 2


class _Counted(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def _random_loader(draw: random.Random, size: int) -> tuple[DataLoader[Any], list[int], bool]:
    """Return a loader, its samples in the order of one process, and whether it may drop some."""
    length, batch_size = draw.randrange(23), draw.randint(1, 5)
    numbers: Any = list(range(23))
    kind = draw.choice(["plain", "drop_last", "shuffled", "batches", "iterable"])
    order = list(range(length))
    if kind == "iterable":
        return DataLoader(_Counted(length), batch_size), order, False
    if kind == "shuffled":
        draw.shuffle(order)
        return DataLoader(numbers, batch_size, sampler=order), order, False
    if kind == "batches":
        cuts = sorted(draw.sample(range(1, length), min(3, length - 1))) if length > 1 else []
        batches = [order[a:b] for a, b in zip([0, *cuts], [*cuts, length], strict=True) if b > a]
        return DataLoader(numbers, batch_sampler=batches), order, False
    return (
        DataLoader(numbers[:length], batch_size, drop_last=kind == "drop_last"),
        order,
        kind != "plain",
    )


def _check_loader(seed: int, size: int) -> str:
    """Gather every batch of a random loader; return what differs from one process."""
    draw = random.Random(seed)
    loader, order, drops = _random_loader(draw, size)
    name = draw.choice([name for name in COLLATES if name != "nested"])  # it holds padded rows
    collate, one_each = COLLATES[name], name in ONE_EACH
    split = draw.random() < 0.2 and (loader.batch_size or 1) % size == 0
    config = DataLoaderConfiguration(split_batches=split and loader.batch_size is not None)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    found = []
    for batch in accelerator.prepare(loader):
        ids = batch.tolist()
        real = accelerator.gather_for_metrics(ids)
        got = accelerator.gather_for_metrics(collate(ids), use_gather_object=one_each)
        if name == "padded":  # perhaps for a longer sample that filled the batch up
            wide, got = got, got[:, : collate(real).shape[1]]
            assert (wide[:, got.shape[1] :] == -100).all()
        if not same(got, collate(real)):
            return f"seed {seed}, {name}: {got} instead of {collate(real)}"
        found += real
    left = len(order) - len(found)
    lost = not drops or left >= size * (loader.batch_size or 0)
    if found != order[: len(found)] or (left and lost):
        return f"seed {seed}, {name}: the samples {found} of {order}"
    after = accelerator.gather_for_metrics(collate([3, 4]), use_gather_object=one_each)
    if not same(after, collate([3, 4] * size)) and not (one_each and isinstance(after, list)):
        return f"seed {seed}, {name}: {after} after the loop"
    return ""


def _empty(rank: int) -> list[int]:
    accelerator = Accelerator(cpu=True)
    nothing: Any = []
    loaders: list[Any] = [DataLoader(d, 2) for d in (_Counted(0), nothing)]
    loaders.append(DataLoader(nothing, None))
    return [len(list(accelerator.prepare(loader))) for loader in loaders]


def test_an_empty_loader_yields_nothing() -> None:
    assert run_ranks(2, _empty) == [[0, 0, 0]] * 2


def _campaign(rank: int, seeds: range, size: int) -> list[str]:
    return [wrong for wrong in (_check_loader(seed, size) for seed in seeds) if wrong]


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_random_loaders_are_gathered_as_on_one_process(size: int) -> None:
    assert run_ranks(size, _campaign, range(40), size) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_1860_random_loaders_are_gathered_as_on_one_process(size: int) -> None:
    seeds = range(1000 * size, 1000 * size + 620)
    assert run_ranks(size, _campaign, seeds, size, timeout=500) == [[]] * size
