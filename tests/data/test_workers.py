"""Workers: what they see, how long they live (DESIGN 2.17)."""

import multiprocessing
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from tests.data.toys import Noisy, Numbers, loader_of, micro_batches, prepare, values


class Witness(Numbers):
    """Tells what its worker shows it."""

    mark = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor([index, info.id, info.num_workers, self.mark])


def _mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.mark = 10 + worker


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_see_the_data_set_and_run_the_users_start(context: str) -> None:
    loader = loader_of(
        Witness(4),
        batch_size=2,
        num_workers=2,
        worker_init_fn=_mark,
        multiprocessing_context=context,
    )
    rows = [row for batch in prepare(loader) for row in batch.tolist()]
    assert rows == [[0, 0, 2, 10], [1, 0, 2, 10], [2, 1, 2, 11], [3, 1, 2, 11]]


def test_persistent_workers_stay_and_hear_of_epochs() -> None:
    loader = loader_of(Noisy(6), batch_size=2, num_workers=2, persistent_workers=True)
    prepared = prepare(loader)
    alive = []
    for epoch in (0, 3, 1):
        parts = micro_batches(prepared, epoch)
        assert {row[4] for part in parts for row in part.data.tolist()} == {epoch}
        alive.append({child.pid for child in multiprocessing.active_children()})
    assert alive[0] == alive[1] == alive[2]
    assert len(alive[0]) == 2
    prepared.close()
    prepared.close()
    assert multiprocessing.active_children() == []
    assert values(micro_batches(prepared, 0)) == [0, 1, 2, 3, 4, 5]
    prepared.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_left_early_starts_anew(persistent: bool) -> None:
    loader = loader_of(Numbers(20), batch_size=2, num_workers=2, persistent_workers=persistent)
    prepared = prepare(loader)
    for batch in prepared:
        assert batch.tolist() == [0, 1]
        break
    if not persistent:
        assert multiprocessing.active_children() == []
    assert values(micro_batches(prepared)) == list(range(20))
    prepared.close()


def test_workers_end_when_the_loop_raises() -> None:
    prepared = prepare(loader_of(Numbers(20), batch_size=2, num_workers=2))

    def loop() -> None:
        for _ in prepared:
            raise ValueError("the model")

    with pytest.raises(ValueError, match="the model"):
        loop()
    assert multiprocessing.active_children() == []


def test_settings_of_the_loader_are_kept() -> None:
    class Slow(Numbers):
        def __getitem__(self, index: int) -> Any:
            multiprocessing.Event().wait(1.0)
            return index

    loader = loader_of(Slow(2), num_workers=1, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"timed out after 0\.2 seconds"):
        list(prepare(loader))
