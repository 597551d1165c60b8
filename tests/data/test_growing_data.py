"""The plan follows a data set that grows or shrinks, on all processes, and the run says so."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.ranks import RanksError, run_ranks
from trainkit import Callback, Trainer
from trainkit.callbacks import Checkpoint

LENGTHS = (8, 12, 4)


class Growing(Dataset[Any]):
    """Has another length in each epoch."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.lengths = lengths
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.lengths[self.epoch]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.zeros(1)


class GrowingStream(IterableDataset[Any], Growing):
    """The same as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return (Growing.__getitem__(self, index) for index in range(len(self)))


def _fit(
    rank: int, folder: Path, data: Any, stop_at: int | None = None, **options: Any
) -> tuple[list[int | None], Any]:
    plans: list[int | None] = []
    keeps = On(Callback.on_step_end, lambda run, result: plans.append(run.planned_steps))
    trainer = Trainer(
        **options.pop("settings", {"max_epochs": 3}),
        callbacks=[keeps, StopsAt(stop_at), Checkpoint()],
        output_dir=folder,
    )
    batch = 4 // trainer.processes.num_processes
    trainer.fit(
        nn.Linear(1, 1),
        DataLoader(data, batch, shuffle=not isinstance(data, IterableDataset)),
        optimizer=partial(torch.optim.SGD, lr=1e-4),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0),
        loss_fn=nn.MSELoss(),
        **options,
    )
    assert trainer.run is not None
    return plans, trainer.run.planned_steps


@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_follows_from_the_first_step_of_the_epoch(size: int, tmp_path: Path) -> None:
    for seen, last in run_ranks(size, _fit, tmp_path, Growing()):
        assert seen == [6, 6, 8, 8, 8, 6]
        assert last == len(seen)


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_of_a_stream_follows_at_the_end_of_the_epoch(size: int, tmp_path: Path) -> None:
    for seen, last in run_ranks(size, _fit, tmp_path, GrowingStream()):
        assert seen == [6, 6, 6, 6, 6, 8]
        assert last == len(seen)


def test_the_run_says_so_and_warns_of_the_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fit(0, tmp_path, Growing())
    text = capsys.readouterr().out
    assert "epoch 1 has 3 steps, so 8 steps are planned now, and no longer 6." in text
    assert "The learning-rate schedule stays that of 6 planned steps." in text
    _fit(0, tmp_path / "steps", Growing(), settings={"max_steps": 6})
    _fit(0, tmp_path / "fixed", Growing((8, 8, 8)))
    assert "planned" not in capsys.readouterr().out


def test_a_resume_inside_a_longer_epoch_has_the_same_plan(tmp_path: Path) -> None:
    whole, _ = _fit(0, tmp_path / "whole", Growing())
    first, _ = _fit(0, tmp_path, Growing(), 4)
    rest, last = _fit(0, tmp_path, Growing(), resume="must")
    assert (first + rest, last) == (whole, 6)


def test_a_resume_between_epochs_does_not_take_another_length_for_another_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, _ = _fit(0, tmp_path / "whole", Growing())
    first, _ = _fit(0, tmp_path, Growing(), 5)
    rest, last = _fit(0, tmp_path, Growing(), resume="must")
    assert (first + rest, last) == (whole, 6)
    assert "another order" not in capsys.readouterr().out


def _uneven(rank: int, folder: Path) -> None:
    _fit(rank, folder, Growing((8, 12 + 4 * rank, 4)))


def test_processes_that_grow_differently_are_told_before_the_epoch(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, _uneven, tmp_path)
    assert "process 0: 12 samples in 3 steps; process 1: 16 samples in 4 steps" in str(caught.value)
