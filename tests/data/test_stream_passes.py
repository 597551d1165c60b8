"""Each pass over a data set with a state is a whole one, as in a loop by hand (rule 15)."""

import random
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.data import streams
from tests.helpers.callbacks import On, StopsAt
from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, Callback, DataLoaderConfiguration, Run, Trainer
from trainkit.callbacks import Checkpoint, Evaluation

KINDS = ["Counting", "Buffering", "Continuing", "Epochs", "Ending", "Sticking", "Walking"]
KINDS += ["Wrapping", "huggingface", "interleaved", "shuffled"]
GOES_ON = ["Counting", "Buffering", "Continuing", "Epochs"]  # after what was read, by hand too
LASTING = {"num_workers": 2, "persistent_workers": True}


class Identity(Trainer):
    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        numbers = batch[0][:, 0]
        return {"scores": numbers, "predictions": numbers, "references": numbers}


def made(kind: str) -> Any:
    return getattr(streams, kind)()


def numbers_of(batch: Any) -> list[int]:
    return [int(number) for number in batch[0][:, 0]]


def loader_of(data: Any, **workers: Any) -> Any:
    return DataLoader(data, 4, collate_fn=streams.collate, **workers)


def by_hand(data: Any, epoch: int | None = None) -> list[int]:
    if epoch is not None and hasattr(data, "set_epoch"):
        data.set_epoch(epoch)
    return [number for batch in loader_of(data) for number in numbers_of(batch)]


def train(loaders: Any, folder: Path | None = None, **settings: Any) -> list[list[int]]:
    resume, stop_at = settings.pop("resume", None), settings.pop("stop_at", None)
    seen: dict[int, list[int]] = {}

    def note(run: Run, batch: Any) -> None:
        seen.setdefault(run.state.epoch, []).extend(numbers_of(batch))

    callbacks = [
        On(Callback.on_microbatch_start, note),
        StopsAt(stop_at),
        *settings.pop("more", []),
        *([] if folder is None else [Checkpoint()]),
    ]
    trainer = Identity(callbacks=callbacks, output_dir=folder, **{"max_epochs": 3, **settings})
    trainer.fit(
        nn.Linear(2, 1).double(),
        loaders,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        loss_fn=nn.MSELoss(),
        resume=resume,
    )
    trainer.close()
    return [*seen.values()]


def evaluations(data: Any, many: int, **workers: Any) -> list[list[int]]:
    found: list[list[int]] = []
    trainer = Identity(max_steps=1, callbacks=[])
    for _ in range(many):
        trainer.evaluate(nn.Linear(2, 1), loader_of(data, **workers), metrics=[keep_in(found)])
    trainer.close()
    return found


def keep_in(found: list[list[int]]) -> Callable[[Tensor, Tensor], dict[str, float]]:
    def numbers(predictions: Tensor, references: Tensor) -> dict[str, float]:
        found.append([int(number) for number in predictions])
        return {"count": float(len(predictions))}

    return numbers


@pytest.mark.parametrize("kind", with_few(["huggingface", "Sticking"], KINDS))
def test_epochs_evaluations_and_predictions_are_those_of_a_loop_by_hand(kind: str) -> None:
    train_data, data, other = made(kind), made(kind), made(kind)
    metrics: list[list[int]] = []
    epochs = train((loader_of(train_data), loader_of(data)), more=[Evaluation([keep_in(metrics)])])
    assert epochs == [by_hand(other, epoch) for epoch in range(3)]
    whole = by_hand(made(kind))
    assert metrics[-3:] == evaluations(data, 4)[:3] == [whole] * 3
    predicted = Identity(max_steps=1, callbacks=[]).predict(nn.Linear(2, 1), loader_of(data))
    assert predicted.tolist() == by_hand(data) == whole
    assert by_hand(train_data) == by_hand(other)


@pytest.mark.parametrize("kind", with_few(["huggingface", "Ending"], KINDS))
@pytest.mark.parametrize("stop_at", [2, 8])
def test_a_pass_that_was_left_shortens_no_other(kind: str, stop_at: int) -> None:
    data = made(kind)
    train(loader_of(data), stop_at=stop_at)
    whole = len(by_hand(made(kind)))
    assert len(train(loader_of(data))[0]) == whole
    train(loader_of(data), stop_at=stop_at)
    assert len(by_hand(data)) == whole


@pytest.mark.parametrize("kind", with_few(["huggingface"], sorted({*KINDS} - {*GOES_ON})))
def test_a_sample_that_was_looked_at_is_in_each_later_pass(kind: str) -> None:
    data = made(kind)
    next(iter(data))
    assert evaluations(data, 3) == [by_hand(made(kind))] * 3
    other = made(kind)
    next(iter(other))
    train(loader_of(other), stop_at=2)
    assert sorted(by_hand(other)) == sorted(by_hand(made(kind)))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kind", "stop_at"), [("shuffled", 9), ("interleaved", 9), ("huggingface", 2)]
)
def test_those_of_hugging_face_go_on_with_other_workers(
    kind: str, stop_at: int, tmp_path: Path
) -> None:
    whole = [*chain.from_iterable(train(loader_of(made(kind))))]
    for number, (before, after) in enumerate([({}, LASTING), (LASTING, {})]):
        folder = tmp_path / str(number)
        first = train(loader_of(made(kind), **before), folder, stop_at=stop_at)
        rest = train(loader_of(made(kind), **after), folder, resume="must")
        assert [*chain.from_iterable(first + rest)] == whole


@pytest.mark.parametrize("kind", with_few(["huggingface"], KINDS))
def test_a_resume_in_the_last_epoch_leaves_a_whole_data_set(kind: str, tmp_path: Path) -> None:
    train(loader_of(made(kind)), tmp_path, stop_at=2, max_epochs=1)
    data = made(kind)
    train(loader_of(data), tmp_path, resume="must", max_epochs=1)
    (again,) = train(loader_of(data), max_epochs=1)
    assert len(again) == len(by_hand(made(kind)))


def _broken_off(rank: int, kind: str, folder: Path, stateful: bool) -> None:
    def numbers(accelerator: Accelerator, loader: Any, passes: int) -> list[list[int]]:
        found: list[list[int]] = []
        for _ in range(passes):
            found.append([])
            for number, batch in enumerate(loader):
                found[-1] += numbers_of(batch)
                if number == 1:
                    break
            accelerator.save_state(folder / str(len(found)))
        return found

    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    whole = numbers(accelerator, accelerator.prepare(loader_of(made(kind))), 3)
    other = Accelerator(cpu=True, dataloader_config=config)
    loader = other.prepare(loader_of(made(kind)))
    other.load_state(folder / "1")
    assert numbers(other, loader, 2) == whole[1:]


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_pass_that_an_own_loop_broke_off_is_over_in_its_state(size: int, tmp_path: Path) -> None:
    cases = [
        (kind, tmp_path / f"{kind} {stateful}", stateful)
        for kind in ("Counting", "Ending", "Walking", "huggingface")
        for stateful in (False, True)
    ]
    run_ranks(size, in_turn, _broken_off, cases)


class ByClock(streams.Counting):
    """Begins elsewhere each time, as a shuffle that takes its seed from the clock."""

    state_dict = None  # type: ignore[assignment]

    def __iter__(self) -> Any:
        yield streams.sample(time.monotonic_ns() % 2**40)
        yield from map(streams.sample, range(1, self.length))


class ByGlobal(ByClock):
    """Begins elsewhere each time, as the generators of the run say."""

    def __iter__(self) -> Any:
        yield streams.sample(random.randrange(2**40))
        yield from map(streams.sample, range(1, self.length))


def _is_told(rank: int, folder: Path | None, kind: type[ByClock], **workers: Any) -> bool:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if folder is not None:
            train(loader_of(kind(), **workers), folder, stop_at=3)
        train(loader_of(kind(), **workers), folder, resume=folder and "must")
    return any("another sample" in str(one.message) for one in found)


@pytest.mark.parametrize(("kind", "told"), [(ByClock, True), (ByGlobal, False)])
def test_readers_of_a_stream_that_see_other_samples_are_told(
    kind: type[ByClock], told: bool, tmp_path: Path
) -> None:
    assert _is_told(0, tmp_path, kind) is told  # read again by a resume
    assert _is_told(0, None, kind, num_workers=2) is told
    assert run_ranks(2, _is_told, None, kind) == [told, told]
