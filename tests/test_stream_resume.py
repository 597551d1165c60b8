"""A resumed stream goes on with the sample after the last one consumed (DESIGN 2.15)."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.data import streams
from tests.helpers.ranks import RanksError, run_ranks
from trainkit import Callback, CheckpointError, Run, Trainer
from trainkit.callbacks import Checkpoint

WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "one": {"num_workers": 1},
    "two": {"num_workers": 2},
    "lasting": {"num_workers": 2, "persistent_workers": True},
}
EPOCHS = 2


class Killed(Exception):
    """What ends a run here."""


class Journal(Callback):
    """Keeps which samples were trained on; ends the run after a window, perhaps."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at
        self.seen: list[list[float]] = []

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.seen += batch[0].tolist()

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        if run.state.step == self.kill_at:
            raise Killed


def train(
    data: Any, folder: Path, kill_at: int | None = None, batch: int = 2, **options: Any
) -> list[list[float]]:
    """Train, and return the samples of this process in their order."""
    workers = options.pop("workers", {})
    settings = {"max_epochs": EPOCHS, **options.pop("settings", {})}
    journal = Journal(kill_at)
    torch.manual_seed(0)
    trainer = Trainer(
        callbacks=[journal, Checkpoint(every_n_steps=1, keep_last=None)],
        output_dir=folder,
        **settings,
    )
    try:
        trainer.fit(
            nn.Linear(2, 1).double(),
            DataLoader(data, batch, **workers),
            optimizer=partial(torch.optim.SGD, lr=1e-3),
            loss_fn=nn.MSELoss(),
            **options,
        )
    except Killed:
        pass
    return journal.seen


def same_process(rank: int, folder: Path, kind: str, workers: str, kills: list[int]) -> None:
    """Kill and resume with the same data set object, at several positions."""
    make, options = getattr(streams, kind), {"workers": WORKERS[workers]}
    whole = train(make(), folder / "whole", **options)
    for kill_at in kills:
        place, data = folder / str(kill_at), make()
        first = train(data, place, kill_at, **options)
        assert first == whole[: len(first)] and len(first) < len(whole)
        rest = train(data, place, resume="must", **options)
        assert first + rest == whole, (rank, kind, workers, kill_at)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", ["Counting", "Shuffling", "Buffering", "Drawing", "Walking"])
def test_the_same_object_goes_on_after_the_last_sample(
    kind: str, workers: str, tmp_path: Path
) -> None:
    same_process(0, tmp_path, kind, workers, [1, 4, 11] if workers == "none" else [4])
