"""A resume inside an epoch has the order that the epoch began with, or is refused (rule 29)."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, WeightedRandomSampler

from tests.accelerator.test_own_samplers import Own, Restored
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit as fit_toys, toy_dataset, toy_model
from trainkit import Callback, CheckpointError, Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.data.order_facts import digest_of

SAMPLES = 24
DATA = toy_dataset(SAMPLES)


class Places:
    """The data set, which keeps what was asked for."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return DATA[index]


class Stop(Callback):
    """Ends the process at a step, as a kill would."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step == self.step:
            raise KeyboardInterrupt


Stop.__module__ = "trainkit.testing.stop"  # one that prepares no sampler


class Ordered(Sampler[int]):
    """An order of its own, that somebody may change."""

    def __init__(self, step: int = 7) -> None:
        self.step = step

    def __iter__(self) -> Iterator[int]:
        return iter(index * self.step % SAMPLES for index in range(SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Pairs(Ordered):
    """Batches of two, as a batch sampler of one's own."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        order = list(super().__iter__())
        return iter([order[i : i + self.size] for i in range(0, SAMPLES, self.size)])

    def __len__(self) -> int:
        return SAMPLES // self.size


def fit(
    folder: Path, loader: Any, *, stop: int | None = None, resume: Any = None, **options: Any
) -> list[int]:
    data = Places()
    callbacks = [Stop(stop), *options.pop("callbacks", []), Checkpoint(every_n_steps=1)]
    options = {"max_epochs": 2} | options
    parts = options.pop("parts", {})
    trainer = Trainer(output_dir=folder, callbacks=callbacks, **options)
    trainer.register_for_checkpointing(**parts)
    model = toy_model()
    before = [parameter.clone() for parameter in model.parameters()]
    try:
        fit_toys(trainer, loader(data), model, resume=resume)
    except KeyboardInterrupt:
        pass
    except CheckpointError:
        assert all(map(torch.equal, before, model.parameters()))
        raise
    return data.seen


def shuffled(data: Any) -> Any:
    return DataLoader(data, 4, shuffle=True)


def plain(data: Any) -> Any:
    return DataLoader(data, 4)


def seeded(seed: int, data: Any) -> Any:
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(seed))


def weighted(first: float, data: Any) -> Any:
    weights = [first] + [1.0] * (SAMPLES - 1)
    return DataLoader(data, 4, sampler=WeightedRandomSampler(weights, SAMPLES))


def ordered(step: int, data: Any) -> Any:
    return DataLoader(data, 4, sampler=Ordered(step))


def paired(size: int, data: Any) -> Any:
    return DataLoader(data, batch_sampler=Pairs(size))


def keyed(step: int, data: Any) -> Any:
    return DataLoader(data, batch_size=None, sampler=Ordered(step))


def dropping(data: Any) -> Any:
    return DataLoader(data, 4, shuffle=True, drop_last=True)


def drawing(data: Any) -> Any:
    return DataLoader(data, 4, sampler=RandomSampler(data, replacement=True))


CHANGES = [
    (shuffled, plain, "sampler: RandomSampler in the checkpoint, SequentialSampler now"),
    (plain, shuffled, "sampler: SequentialSampler in the checkpoint, RandomSampler now"),
    (shuffled, drawing, "replacement: False in the checkpoint, True now"),
    (partial(seeded, 1), partial(seeded, 2), r"seeds of its generators: \[1\].*, \[2\] now"),
    (partial(weighted, 1.0), partial(weighted, 90.0), "the sampler gives another order"),
    (partial(ordered, 7), partial(ordered, 5), "the sampler gives another order"),
    (partial(ordered, 7), partial(paired, 4), "samples of a window: 4 in the checkpoint, None now"),
    (partial(paired, 2), partial(paired, 4), "the batches that make a step"),
]


@pytest.mark.parametrize(("before", "after", "words"), CHANGES)
def test_another_order_inside_an_epoch_is_refused(
    before: Any, after: Any, words: str, tmp_path: Path
) -> None:
    first = fit(tmp_path, before, stop=4)
    with pytest.raises(CheckpointError, match=words):
        fit(tmp_path, after, resume="must")
    rest = fit(tmp_path, before, resume="must")
    batch = len(first) // 4
    assert first[: 3 * batch] + rest == fit(tmp_path / "whole", before)


def test_a_sampler_of_whole_batches_is_compared_as_well(tmp_path: Path) -> None:
    class Batches(Places):
        def __getitem__(self, index: int) -> Any:
            return [part.unsqueeze(0) for part in DATA[index]]

    fit(tmp_path, lambda _: keyed(7, Batches()), stop=4)
    with pytest.raises(CheckpointError, match="the sampler gives another order"):
        fit(tmp_path, lambda _: keyed(5, Batches()), resume="must")
    fit(tmp_path, lambda _: keyed(7, Batches()), resume="must")


def test_between_epochs_another_order_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, shuffled, stop=7)
    assert fit(tmp_path, plain, resume="must") == list(range(SAMPLES))
    told = "other epochs have another order now: sampler: RandomSampler in the checkpoint"
    assert told in capsys.readouterr().out


def test_what_changes_no_sample_of_the_epoch_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, shuffled, stop=4)
    fit(tmp_path, dropping, resume="must", max_grad_norm=1.0)
    out = capsys.readouterr().out
    assert "drop_last: False in the checkpoint, True now" in out
    assert "`max_grad_norm` was None and is 1.0" in out


def on_ranks(rank: int, folder: Path, resume: Any, before: Any, accumulation: int) -> list[int]:
    stop = None if resume else 2
    return fit(folder, before, stop=stop, resume=resume, gradient_accumulation_steps=accumulation)


@pytest.mark.e2e
@pytest.mark.parametrize("one", [shuffled, partial(paired, 4)])
def test_the_order_is_that_of_any_number_of_processes(one: Any, tmp_path: Path) -> None:
    """Batches of 4 on two processes, and twice as many on one, make the same steps."""
    whole = run_ranks(2, on_ranks, tmp_path / "whole", "auto", one, 1)
    first = run_ranks(2, on_ranks, tmp_path, None, one, 1)
    (rest,) = run_ranks(1, on_ranks, tmp_path, "must", one, 2)
    assert sorted([*first[0][:4], *first[1][:4], *rest]) == sorted([*whole[0], *whole[1]])


class Curriculum(Ordered):
    """A sampler with a state, which a resume puts back."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]


@pytest.mark.parametrize("loads", [True, False])
def test_a_sampler_that_is_loaded_with_the_run_is_compared_then(
    loads: bool, tmp_path: Path
) -> None:
    def train(step: int, folder: Path, stop: int | None, resume: str | None) -> Any:
        data: Any = Places()
        sampler = Curriculum(step)
        trainer = Trainer(
            max_epochs=1, output_dir=folder, callbacks=[Stop(stop), Checkpoint(every_n_steps=1)]
        )
        trainer.register_for_checkpointing(sampler=sampler if loads else Curriculum(1))
        with suppress(KeyboardInterrupt):
            fit_toys(trainer, DataLoader(data, 4, sampler=sampler), resume=resume)
        return data.seen

    train(5, tmp_path, 4, None)
    if loads:
        assert train(7, tmp_path, None, "must") == [i * 5 % SAMPLES for i in range(12, SAMPLES)]
    else:
        with pytest.raises(CheckpointError, match="nothing was trained"):
            train(7, tmp_path, None, "must")


def owning(seed: int | None, data: Any) -> Any:
    return DataLoader(data, 4, sampler=Own(seed))


@pytest.mark.parametrize("stop", [4, 7, 10, 13])
def test_a_sampler_with_a_generator_of_its_own_goes_on_where_it_was(
    stop: int, tmp_path: Path
) -> None:
    whole = fit(tmp_path / "whole", partial(owning, 3), max_epochs=3)
    assert whole[:SAMPLES] != whole[SAMPLES : 2 * SAMPLES] != whole[2 * SAMPLES :]
    fit(tmp_path, partial(owning, 3), stop=stop, max_epochs=3)
    rest = fit(tmp_path, partial(owning, 3), resume="must", max_epochs=3)
    assert rest == whole[4 * (stop - 1) :]


@pytest.mark.parametrize("stop", [4, 7])
def test_one_that_cannot_is_refused(stop: int, tmp_path: Path) -> None:
    fit(tmp_path, partial(owning, None), stop=stop)
    with pytest.raises(CheckpointError, match=r"keeps a random state of its own.*`set_epoch`"):
        fit(tmp_path, partial(owning, None), resume="must")


def test_one_that_is_registered_may_begin_anywhere(tmp_path: Path) -> None:
    def run(**options: Any) -> list[int]:
        sampler = Restored(None)
        loader = partial(DataLoader, batch_size=4, sampler=sampler)
        return fit(tmp_path, loader, parts={"sampler": sampler}, **options)

    first = run(stop=7)
    assert run(resume="must")[:4] == first[SAMPLES : SAMPLES + 4]


def test_the_digest_of_a_long_epoch_costs_next_to_nothing() -> None:
    order = torch.randperm(1_000_000)
    start = time.process_time()
    digest = digest_of(order)
    # 0.02 s here; a list, as custom samplers give it, 0.15 s
    assert time.process_time() - start < 1
    assert digest == digest_of(order.tolist())
    assert digest != digest_of(order.flip(0))
    assert digest_of([object()]) is None
    assert digest_of([("a", 1)]) == digest_of([("a", 1)]) != digest_of([("a", 2)])


class Mining(Sampler[int]):
    """Draws what was hard more often, by a tensor or list of its own, or a tensor of the data."""

    def __init__(self, how: str, data: Any) -> None:
        self.how, self.data = how, data
        self.weights = torch.ones(SAMPLES)
        self.levels = [1.0] * SAMPLES
        self.level, self.passes = 1.0, 0

    def change(self, step: int) -> None:
        {"tensor": self.weights, "list": self.levels, "data": self.data.table}[self.how][step] += 9

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        if self.how == "passes":  # counts them itself, without `set_epoch`
            yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.passes))
            return
        if self.how == "number":
            yield from (torch.arange(SAMPLES) * int(self.level) % SAMPLES).tolist()
            return
        weights = {"tensor": self.weights, "list": self.levels, "data": self.data.table}[self.how]
        drawn = torch.multinomial(torch.as_tensor(weights), SAMPLES, replacement=True)
        yield from drawn.tolist()

    def __len__(self) -> int:
        return SAMPLES


class Mines(Callback):
    """Changes the sampler in each step, or at the end of each epoch."""

    def __init__(self, sampler: Mining) -> None:
        self.sampler = sampler

    def on_step_end(self, run: Run, result: Any) -> None:
        if self.sampler.how in ("tensor", "list", "data"):
            self.sampler.change(run.state.step)

    def on_epoch_end(self, run: Run) -> None:
        self.sampler.level += 4


def mine(how: str, folder: Path, stops: tuple[int, ...] = ()) -> list[int]:
    """Train for three epochs of six steps, killed in some of them; return what was read."""
    seen: list[int] = []
    for stop in (*stops, None):
        data: Any = Places()
        data.table = torch.ones(SAMPLES)
        sampler = Mining(how, data)
        trainer = Trainer(
            max_epochs=3,
            output_dir=folder,
            callbacks=[Mines(sampler), Checkpoint(every_n_steps=1), Stop(stop)],
        )
        with suppress(KeyboardInterrupt):
            fit_toys(trainer, DataLoader(data, 4, sampler=sampler), resume="auto")
        # A checkpoint of each step but the one in which it was stopped.
        seen += data.seen if stop is None else data.seen[: 4 * (stop - 1) - len(seen)]
    return seen


@pytest.mark.parametrize("how", with_few(["data"], ["tensor", "list", "data", "number", "passes"]))
def test_a_sampler_that_training_changes_goes_on_as_it_was(how: str, tmp_path: Path) -> None:
    whole = mine(how, tmp_path / "whole")
    assert len({tuple(whole[at : at + SAMPLES]) for at in range(0, 3 * SAMPLES, SAMPLES)}) == 3
    for stops in ((3,), (7,), (9,), (9, 11), (13,), (3, 9, 15, 17)):
        folder = tmp_path / repr(stops)
        assert mine(how, folder, stops) == whole, stops


def test_weights_that_change_inside_an_epoch_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine("tensor", tmp_path / "a")
    told = "the weights of the sampler `Mining` changed inside of an epoch"
    assert capsys.readouterr().out.count(told) == 1
    mine("number", tmp_path / "b")
    assert told not in capsys.readouterr().out
