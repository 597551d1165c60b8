"""An iterable data set in a loop of the user's own goes on where its state was saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data import streams
from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, DataLoaderConfiguration

WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


def _read(rank: int, folder: Path, kind: str, stateful: bool, workers: dict[str, Any]) -> None:
    """Save after each batch of two epochs, and go on from each state with the same objects."""
    config = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(
        DataLoader(getattr(streams, kind)(12 if workers else 11), 2, **workers)
    )
    whole: list[Any] = []
    for epoch in range(2):
        for batch, _ in loader:
            whole.append((epoch, batch.tolist(), torch.rand(1).item()))
            accelerator.save_state(folder / str(len(whole)))
    length = len(whole) // 2
    for done in (2, length, length + 1):
        accelerator.load_state(folder / str(done))
        rest: list[Any] = []
        for epoch in range(done // length, 2):
            skip = done - epoch * length if epoch == done // length else 0
            skips = skip > 0 and not stateful
            for batch, _ in accelerator.skip_first_batches(loader, skip) if skips else loader:
                rest.append((epoch, batch.tolist(), torch.rand(1).item()))
        assert whole[:done] + rest == whole, (done, kind, stateful)


@pytest.mark.parametrize("size", with_few([2], [1, 2]))
def test_a_loop_goes_on_after_the_batch_that_was_consumed(size: int, tmp_path: Path) -> None:
    cases: list[tuple[Any, ...]] = [
        (tmp_path / "0", "Counting", True, {}),
        (tmp_path / "1", "Buffering", False, {}),
        (tmp_path / "2", "Buffering", True, WORKERS),
        (tmp_path / "3", "Stateless", True, {}),
    ]
    run_ranks(size, in_turn, _read, cases)
