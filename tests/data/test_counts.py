"""What a step costs over a raw loop, counted: no clock takes part in it (rule 36)."""

import gc
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.helpers.tiers import with_few
from trainkit import Callback, Trainer
from trainkit.callbacks import (
    Checkpoint,
    Journal,
    ProgressBar,
    TensorBoardLogger,
    progress_bar as progress_bar_module,
)

# Calls a step, without callbacks. On Python 3.13 ours takes 11 fewer, and a loop by hand 13; with
# torch 2.15 a loop by hand takes 2 fewer: the ranges of its profiler, which ours never opens.
OVER_RAW = 55 + 2 * (sys.version_info >= (3, 13)) + 2 * (torch.__version__ >= "2.15")
OVER_RAW_LOADED = 120  # with the callbacks of an ordinary run
JOURNAL = 12  # calls more for the journal, which `Checkpoint` brings along
A_SAMPLE = 6  # calls more for each sample that is fetched alone: its random streams
A_BATCH = 3  # and for their batch: the generators of the data set, which come back without a copy
SHORT, LONG = 50, 250  # steps; both end at a log step, so that what is logged is counted
FEATURES = 8


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A data set that can only hand out one sample at a time."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


DATASETS: dict[str, Callable[[Tensor, Tensor], Dataset[Any]]] = {
    "tensors": TensorDataset,
    "rows": Rows,
}


class Clock:
    """Time for the progress bar: each look at it takes 1 ms, however slow the machine is."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def monotonic(self) -> float:
        return next(self._ticks) * 1e-3


def make_parts(kind: str, batch_size: int, steps: int) -> tuple[nn.Module, DataLoader[Any]]:
    inputs = torch.zeros(steps * batch_size, FEATURES)
    data = DATASETS[kind](inputs, torch.zeros(len(inputs), 1))
    return nn.Linear(FEATURES, 1), DataLoader(data, batch_size=batch_size, shuffle=True)


def raw(kind: str, batch_size: int, steps: int) -> None:
    model, loader = make_parts(kind, batch_size, steps)
    optimizer, loss_fn = SGD(model.parameters(), lr=1e-3), nn.MSELoss()
    model.train()
    for inputs, targets in loader:
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def ours(
    kind: str,
    batch_size: int,
    steps: int,
    *,
    callbacks: Callable[[], list[Callback]] = list,
    folder: Path | None = None,
) -> None:
    model, loader = make_parts(kind, batch_size, steps)
    output_dir = None if folder is None else folder / str(len(list(folder.iterdir())))
    trainer = Trainer(max_epochs=1, callbacks=callbacks(), output_dir=output_dir)
    result = trainer.fit(model, loader, optimizer=partial(SGD, lr=1e-3), loss_fn=nn.MSELoss())
    assert result.step == steps


def count(run: Callable[[], None]) -> int:
    """Return the Python and C functions that `run` calls, in all threads that it starts."""
    calls = itertools.count()  # `next` of it is one step that no other thread can come between

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            next(calls)

    gc.collect()
    gc.disable()  # what it calls belongs to others
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        gc.enable()
    return next(calls)


def calls_of_a_step(run: Callable[..., None], kind: str, batch_size: int, **options: Any) -> float:
    """Return the calls of a step: what a longer run has more, so that set-up is left out."""
    run(kind, batch_size, SHORT, **options)  # fills the caches of Python and torch
    short, long = (
        count(partial(run, kind, batch_size, steps, **options)) for steps in (SHORT, LONG)
    )
    return (long - short) / (LONG - SHORT)


@cache
def raw_calls(kind: str, batch_size: int) -> float:
    return calls_of_a_step(raw, kind, batch_size)


@cache
def our_calls(kind: str, batch_size: int) -> float:
    return calls_of_a_step(ours, kind, batch_size)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("batch_size", with_few([1], [1, 32]))
@pytest.mark.parametrize("kind", DATASETS)
def test_a_step_takes_few_calls_over_a_raw_loop(kind: str, batch_size: int) -> None:
    over = our_calls(kind, batch_size) - raw_calls(kind, batch_size)
    assert over <= OVER_RAW + (A_SAMPLE * batch_size + A_BATCH if kind == "rows" else 0)


def test_a_batch_of_tensors_takes_fewer_calls_than_in_a_raw_loop() -> None:
    assert our_calls("tensors", 32) < raw_calls("tensors", 32)


def test_an_ordinary_run_takes_few_calls_over_a_raw_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(progress_bar_module, "time", Clock())

    def callbacks() -> list[Callback]:
        return [ProgressBar(), TensorBoardLogger(), Checkpoint()]

    calls = calls_of_a_step(ours, "tensors", 1, callbacks=callbacks, folder=tmp_path)
    assert calls - raw_calls("tensors", 1) <= OVER_RAW_LOADED


def test_a_journal_takes_few_calls(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        return [Journal()]

    calls = calls_of_a_step(ours, "tensors", 1, callbacks=callbacks, folder=tmp_path)
    assert calls - our_calls("tensors", 1) <= JOURNAL


def test_calls_in_other_threads_are_counted() -> None:
    def in_a_thread() -> None:
        thread = threading.Thread(target=lambda: [abs(number) for number in range(1000)])
        thread.start()
        thread.join()

    assert count(in_a_thread) > 1000
