"""A resumed stream goes on with the sample after the last one consumed (rule 15)."""

import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.data import streams
from tests.helpers.callbacks import OfOneRun
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, Run, Trainer, set_seed
from trainkit.callbacks import Checkpoint
from trainkit.data import presharded
from trainkit.data.batch_sources import Presharded

WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"num_workers": 1},
    "two": {"num_workers": 2},
    "lasting": {"num_workers": 2, "persistent_workers": True},
}
EPOCHS = 2


class Killed(Exception):
    """What ends a run here."""


class Journal(OfOneRun):
    """Keeps which samples were trained on; ends the run after a window, perhaps."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.seen: list[list[float]] = []

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.seen += batch[0].tolist()

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        if run.state.step != self.kill_at:
            return
        if run.processes.num_processes == 1:
            raise Killed
        run.request_stop("killed", agreed=True)  # an error of one would end the other


def train(
    data: Any, folder: Path, kill_at: int | None = None, batch: int = 2, **options: Any
) -> list[list[float]]:
    """Train, and return the samples of this process in their order."""
    workers = options.pop("workers", {})
    settings = {"max_epochs": EPOCHS, **options.pop("settings", {})}
    journal = Journal(kill_at)
    torch.manual_seed(0)
    trainer = Trainer(
        callbacks=[journal, Checkpoint(every_n_steps=kill_at or 10_000)],
        output_dir=folder,
        **settings,
    )
    with suppress(Killed):
        trainer.fit(
            nn.Linear(2, 1).double(),
            data
            if isinstance(data, Presharded | DataLoader)
            else DataLoader(data, batch, collate_fn=streams.collate, **workers),
            optimizer=partial(torch.optim.SGD, lr=1e-3),
            loss_fn=nn.MSELoss(),
            **options,
        )
    return journal.seen


def kill_and_resume(rank: int, folder: Path, cases: list[tuple[str, str, int]]) -> None:
    """Resume in the process that was killed, with the same data set object."""
    unbroken: dict[tuple[str, str], list[list[float]]] = {}
    for kind, workers, kill_at in cases:
        make = getattr(streams, kind)
        options: dict[str, Any] = {"workers": WORKERS[workers]}
        place, data = folder / f"{kind} {workers} {kill_at}", make()
        if (kind, workers) not in unbroken:
            unbroken[kind, workers] = train(make(), place / "whole", **options)
        whole = unbroken[kind, workers]
        first = train(data, place, kill_at, **options)
        assert 0 < len(first) < len(whole)
        rest = train(data, place, resume="must", **options)
        assert first + rest == whole, (kind, workers, kill_at)


STATEFUL = ["Counting", "Shuffling", "Buffering", "Drawing", "Walking"]
STATEFUL += ["Continuing", "Epochs", "Ending", "Sticking", "Wrapping", "huggingface"]


@pytest.mark.parametrize("kind", with_few([], STATEFUL))
def test_the_same_object_goes_on_after_the_last_sample(kind: str, tmp_path: Path) -> None:
    cases = [(kind, "none", kill_at) for kill_at in (1, 4, 11, 13)]
    kill_and_resume(0, tmp_path, cases + [(kind, workers, 4) for workers in ("two", "lasting")])


class Anew(streams.Counting):
    """Forgets in `__iter__` what it was given."""

    def __iter__(self) -> Iterator[streams.Sample]:
        self.position = 0
        return super().__iter__()


@pytest.mark.parametrize("workers", ["none", "one"])
def test_a_data_set_that_does_not_take_its_state_is_told(workers: str, tmp_path: Path) -> None:
    train(Anew(), tmp_path, 4, workers=WORKERS[workers])
    with pytest.warns(UserWarning, match="`Anew` begins .* from which its `__iter__` must go on"):
        train(Anew(), tmp_path, resume="must", workers=WORKERS[workers])


@pytest.mark.e2e
def test_two_processes_go_on_after_the_last_sample(tmp_path: Path) -> None:
    cases = [(kind, "none", 4) for kind in (*STATEFUL, "Stateless", "Sharded", "Merging")]
    cases += [("Sharded", "none", kill_at) for kill_at in (1, 5, 6, 8)]
    cases += [("Counting", "two", 2), ("Buffering", "lasting", 6), ("Sharded", "one", 5)]
    run_ranks(2, kill_and_resume, tmp_path, cases, timeout=300)


def phase(rank: int, kind: str, folder: Path, *args: Any, **options: Any) -> list[list[float]]:
    return train(getattr(streams, kind)(), folder, *args, **options)


def together(ranks: list[list[list[float]]]) -> list[float]:
    return sorted(one[0] for of_rank in ranks for one in of_rank)


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_new_process_goes_on_after_the_last_sample(size: int, tmp_path: Path) -> None:
    for kind in ("Counting", "Shuffling", "Sharded"):
        place, two = tmp_path / kind, WORKERS["two"]
        whole = run_ranks(size, phase, kind, place / "whole")
        first = run_ranks(size, phase, kind, place, 3, workers=two)
        rest = run_ranks(size, phase, kind, place, resume="must")  # with other workers
        assert [one + other for one, other in zip(first, rest, strict=True)] == whole


@pytest.mark.parametrize("kind", with_few(["Merging"], ["Counting", "Buffering", "Merging"]))
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_after_the_last_sample(
    kind: str, before: int, after: int, tmp_path: Path
) -> None:
    once: dict[str, Any] = {"settings": {"max_epochs": 1}}
    batch = 8 // before
    first = run_ranks(before, phase, kind, tmp_path, 2, batch, **once)
    rest = run_ranks(after, phase, kind, tmp_path, None, 8 // after, resume="must", **once)
    whole = run_ranks(1, phase, kind, tmp_path / "whole", None, 8, **once)
    assert sorted(together(first) + together(rest)) == together(whole)


@pytest.mark.e2e
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_shards_that_do_not_say_how_are_refused_before_the_first_step(
    before: int, after: int, tmp_path: Path
) -> None:
    run_ranks(before, phase, "Sharded", tmp_path, 1, 6 // before)
    with pytest.raises(RanksError) as caught:
        run_ranks(after, phase, "Sharded", tmp_path, None, 6 // after, resume="must")
    for text in caught.value.failures.values():
        assert f"read as {before} shard(s)" in text
        assert f"now they are {after}" in text
        assert "`merge_state_dicts(states)`" in text


class Shuffling:
    """No `DataLoader`: batches from a buffer, with noise."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer = [torch.full((2, 2), number, dtype=torch.float64) for number in range(9)]
        while buffer:
            inputs = buffer.pop(random.randrange(len(buffer))) + 0.1 * torch.rand(2, 2)
            yield inputs, inputs.sum(1, keepdim=True)


def _go_on_with_another_loader(rank: int, folder: Path, accumulation: int) -> None:
    settings: dict[str, Any] = {"settings": {"gradient_accumulation_steps": accumulation}}
    whole = train(presharded(Shuffling()), folder / "whole", **settings)
    for kill_at in (1, 3):
        place = folder / str(kill_at)
        first = train(presharded(Shuffling()), place, kill_at, **settings)
        rest = train(presharded(Shuffling()), place, resume="must", **settings)
        assert first + rest == whole


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.e2e)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_a_loader_of_another_kind_draws_is_as_in_the_unbroken_run(
    accumulation: int, size: int, tmp_path: Path
) -> None:
    run_ranks(size, _go_on_with_another_loader, tmp_path, accumulation)


def test_what_it_draws_in_a_loop_of_ones_own_is_as_in_the_unbroken_loop(tmp_path: Path) -> None:
    def read(done: int) -> list[list[float]]:
        accelerator, seen = Accelerator(cpu=True), []
        set_seed(5)
        loader = accelerator.prepare(presharded(Shuffling()))
        if done:
            accelerator.load_state(tmp_path)
        for inputs, _ in accelerator.skip_first_batches(loader, done) if done else loader:
            seen.append([*inputs.flatten().tolist(), torch.rand(()).item()])
            if len(seen) == 4 and not done:
                accelerator.save_state(tmp_path)
        return seen

    whole = read(0)
    assert read(4) == whole[4:]


def _go_on_with_torchdata(rank: int, size: int, folder: Path, iterable: bool) -> list[list[float]]:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(1)  # from which its own sampler takes the seed of its generator
    data: Any = streams.Counting(12) if iterable else [streams.sample(index) for index in range(12)]

    def make(**options: Any) -> Any:
        torch.manual_seed(1)
        shuffle = {} if iterable else {"shuffle": True}
        return torchdata.StatefulDataLoader(data, 4 // size, **shuffle, **options)

    whole = train(make(), folder / "whole")
    first = train(make(), folder, 4)  # inside the second epoch
    assert first + train(make(num_workers=2), folder, resume="must") == whole
    return whole[: 12 // size]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torchdata
@pytest.mark.parametrize("iterable", [False, True])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.e2e)])
def test_a_loader_of_torchdata_is_shared_out_and_resumed_like_one_of_torch(
    size: int, iterable: bool, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata")
    found = run_ranks(size, _go_on_with_torchdata, size, tmp_path, iterable)
    assert together(found) == [*range(12)]
