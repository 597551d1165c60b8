"""Loaders, samplers and data sets of `accelerate.data_loader`, beside Accelerate's own."""

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

import trainkit.accelerate_compat as accelerate
from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from trainkit import Accelerator, DataLoaderConfiguration, skip_first_batches
from trainkit.errors import ConfigError

OURS = accelerate.data_loader
THEIRS: Any = late("accelerate.data_loader")


_NUMBERS: Any = list(range(8))


class _Words(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def _batches(size: int, regular: bool) -> Any:
    if regular:
        return BatchSampler(range(size), batch_size=4, drop_last=size % 2 == 1)
    return [list(range(at, min(at + 1 + at % 3, size))) for at in range(0, size, 3)]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("size", [1, 3, 8, 13, 16, 22])
def test_batches_are_cut_for_a_process_as_there(size: int, split: bool, even: bool) -> None:
    for regular in (True, False) if not split else (True,):
        for rank in range(2):
            given: Any = (2, rank, split, even)
            theirs = THEIRS.BatchSamplerShard(_batches(size, regular), *given)
            ours = OURS.BatchSamplerShard(_batches(size, regular), *given)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="has no `batch_size`"):
        OURS.BatchSamplerShard([[1, 2]], 2, 0, split_batches=True)
    with pytest.raises(ConfigError, match="not a multiple of 3"):
        OURS.BatchSamplerShard(_batches(8, True), 3, 0, split_batches=True)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("size", [2, 8, 13])
def test_samples_are_cut_for_a_process_as_there(size: int, split: bool, drop_last: bool) -> None:
    for rank in range(2):
        given: Any = (_Words(size), 4, drop_last, 2, rank, split)
        theirs, ours = (kind.IterableDatasetShard(*given) for kind in (THEIRS, OURS))
        assert list(ours) == list(theirs)


def test_what_skips_and_shuffles_is_as_there() -> None:
    for kind in (THEIRS, OURS):
        skipping = kind.SkipBatchSampler(_batches(10, True), 1)
        assert (list(skipping), len(skipping)) == ([[4, 5, 6, 7], [8, 9]], 2)
        loader = kind.SkipDataLoader(list(range(16)), batch_size=4, skip_batches=2)
        assert [x.tolist() for x in loader] == [[8, 9, 10, 11], [12, 13, 14, 15]]
        assert isinstance(loader, DataLoader)
    theirs, ours = (kind.SeedableRandomSampler(range(9), data_seed=3) for kind in (THEIRS, OURS))
    assert [list(ours) for _ in range(3)] == [list(theirs) for _ in range(3)]


@pytest.mark.parametrize("kind", ["DataLoaderShard", "DataLoaderDispatcher"])
def test_a_loader_made_by_hand_tells_its_end(kind: str) -> None:
    loader = getattr(OURS, kind)(list(range(16)), batch_size=4)
    seen: list[Any] = []
    for _ in range(2):
        seen = [(x.tolist(), loader.end_of_dataloader) for x in loader]
        assert [last for _, last in seen] == [False, False, False, True]
    assert seen[3][0] == [12, 13, 14, 15]
    assert isinstance(loader, getattr(OURS, kind))
    assert isinstance(loader, DataLoader)
    assert len(list(getattr(OURS, kind)(range(16), batch_size=4, skip_batches=3))) == 1


@pytest.mark.parametrize("data", [list(range(13)), _Words(13)], ids=["mapped", "iterable"])
def test_a_loader_for_another_process_is_what_that_one_would_have(data: Any) -> None:
    for rank in range(2):
        each = [
            kind.prepare_data_loader(DataLoader(data, batch_size=2), None, 2, rank)
            for kind in (THEIRS, OURS)
        ]
        theirs, ours = ([x.tolist() for x in loader] for loader in each)
        assert ours == theirs


def _gathered(rank: int) -> list[int]:
    accelerator = Accelerator(cpu=True)
    loader = OURS.prepare_data_loader(DataLoader(_NUMBERS[:7], batch_size=2), put_on_device=True)
    torch.manual_seed(accelerator.process_index)
    own = torch.Generator().manual_seed(accelerator.process_index)
    OURS.synchronize_rng_states(["torch", "generator"], own)
    drawn = torch.stack([torch.rand(()), torch.rand((), generator=own)])
    assert len({*accelerator.gather(drawn).tolist()}) == 1
    rows = [accelerator.gather_for_metrics(x) for x in loader]
    return [int(value) for row in rows for value in row]


def test_its_samples_are_gathered_each_once() -> None:
    assert run_ranks(2, _gathered) == [list(range(7))] * 2


def test_prepared_loaders_are_loaders() -> None:
    accelerator = Accelerator(cpu=True)
    given = DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    loader = accelerator.prepare(given)
    assert isinstance(loader, OURS.DataLoaderShard)
    assert not isinstance(loader, OURS.DataLoaderDispatcher)
    assert not isinstance(given, OURS.DataLoaderShard)
    for each in (loader, skip_first_batches(loader, 1)):
        assert isinstance(each, DataLoader)
        assert each.batch_size == 2
        assert each.sampler is given.sampler
        assert each.num_workers == 0
    assert accelerator.prepare(loader) is loader
    assert skip_first_batches(loader, 1).skip_batches == 1


@pytest.mark.filterwarnings("ignore")  # of torchdata
def test_a_stateful_loader_is_one_of_torchdata() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(_NUMBERS[:8], batch_size=2))
    assert isinstance(loader, stateful)
    reading = iter(loader)
    next(reading)
    state = loader.state_dict()
    reading.close()
    loader.load_state_dict(state)
    assert [x.tolist() for x in loader] == [[2, 3], [4, 5], [6, 7]]
    theirs, ours = (
        kind.SkipDataLoader(range(16), batch_size=2, skip_batches=3, use_stateful_dataloader=True)
        for kind in (THEIRS, OURS)
    )
    assert isinstance(ours, stateful)
    assert isinstance(ours, OURS.SkipDataLoader)
    assert isinstance(ours.base_dataloader, stateful)
    for each in (theirs, ours):
        assert next(iter(each)).tolist() == [6, 7]
    assert ours.state_dict() == stateful(range(16), batch_size=2).state_dict() | ours.state_dict()
    ours.load_state_dict(ours.state_dict())
    assert [x.tolist() for x in ours] == [[14, 15]]  # what is left out is so in every pass


def test_a_prepared_optimizer_is_pickled_as_the_one_inside() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is torch.optim.SGD
    assert again.param_groups[0]["lr"] == 0.5
    assert torch.equal(again.param_groups[0]["params"][0], model.weight)


def test_a_compiled_wrapper_is_unwrapped_inside() -> None:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    compiled: Any = torch.compile(nn.DataParallel(model))
    kept: Any = accelerator.unwrap_model(compiled)
    assert kept is compiled
    assert next(kept.children()) is model
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


# What `prepare` does not know.


class _Own:
    def step(self) -> None: ...


def test_prepare_hands_back_what_it_does_not_know() -> None:
    accelerator, things = Accelerator(cpu=True), [_Own(), [1, 2], {"a": 1}, "text", None, 3]
    assert all(a is b for a, b in zip(accelerator.prepare(*things), things, strict=True))


def _handed_back(rank: int) -> list[str]:
    accelerator, said = Accelerator(cpu=True), []
    for thing in (_Own(), iter([1]), _Words(3), None):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert accelerator.prepare(thing) is thing
        said.append(" ".join(str(each.message) for each in caught))
    return said


def test_it_says_so_where_each_process_would_read_all() -> None:
    for own, iterator, words, none in run_ranks(2, _handed_back):
        assert own == none == ""
        assert "which stays as it is" in iterator
        assert "`_Words`" in words


def _twice(rank: int) -> bool:
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    first, second = accelerator.prepare(model), accelerator.prepare(model)
    third = accelerator.prepare_model(model)
    return first is second is third and accelerator.unwrap_model(first) is model


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_is_prepared_again_is_what_it_was(size: int) -> None:
    assert run_ranks(size, _twice) == [True] * size


def test_on_one_process_any_number_means_it() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.on_process(process_index=1)(lambda: 3)() == 3
    assert accelerator.on_local_process(lambda: 4, local_process_index=7)() == 4
