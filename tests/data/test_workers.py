"""Workers: what they see, how long they live (rule 17)."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from tests.data.toys import Noisy, Numbers, loader_of, micro_batches, prepare, values
from tests.helpers.tiers import with_few
from trainkit.data import workers
from trainkit.errors import DataError


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


@pytest.mark.parametrize("context", with_few(["fork"], ["fork", "spawn"]))
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


class Marked(Noisy):
    """Tells what was set on it."""

    mark = 0

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.mark, self.epoch])


def test_what_is_set_on_a_data_set_reaches_workers_when_they_start() -> None:
    seen: list[Any] = []
    for options in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        dataset = Marked(2)
        prepared = prepare(loader_of(dataset, batch_size=1, **options))
        seen.append([])
        for _ in range(2):
            for batch in prepared:
                seen[-1] += batch.tolist()
                dataset.mark += 1
    assert seen[0] == [[0, 0], [1, 0], [2, 1], [3, 1]]
    assert seen[1] == [[0, 0], [0, 0], [2, 1], [2, 1]]
    assert seen[2] == [[0, 0], [0, 0], [0, 1], [0, 1]]


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


class Fatal(Numbers):
    """Ends the worker, or raises in it, at sample 3."""

    def __init__(self, length: int, end: Callable[[], None]) -> None:
        super().__init__(length)
        self.end = end

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            self.end()
        return torch.tensor([index])


class Coded(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"code {code}: {reason}")


class Picky(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(f"code {int(code)}")


class Mute(Exception):
    def __str__(self) -> str:
        return "always the same"


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error", [Coded(7, reason="unwell"), Picky("8"), Mute("unwell"), KeyError("unwell")]
)
def test_every_error_of_a_worker_arrives_with_its_text(error: Exception) -> None:
    loader = loader_of(Fatal(6, partial(_raise, error)), batch_size=2, num_workers=1)
    with pytest.raises(Exception, match="in DataLoader worker process 0") as caught:
        list(prepare(loader))
    text = str(caught.value).replace("\\n", "\n")
    assert str(error) in text
    assert "at sample 3 of the data set `Fatal`, epoch 0" in text


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by the signal SIGKILL.*memory"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "killed by the signal SIGBUS.*shm-size"),
        (lambda: os._exit(3), "ended by itself with the exit code 3"),
    ],
)
def test_the_end_of_a_worker_is_explained(
    end: Callable[[], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = _MultiProcessingDataLoaderIter._try_get_data  # torch alone would wait so long
    monkeypatch.setattr(looks, "__defaults__", (600.0,))
    start = time.monotonic()
    with pytest.raises((DataError, RuntimeError), match=r"[Ww]orker") as caught:
        list(prepare(loader_of(Fatal(6, end), batch_size=2, num_workers=2)))
    assert time.monotonic() - start < 300
    if not isinstance(caught.value, DataError):  # torch's signal handler came between batches
        words = r"killed by signal|exited unexpectedly"
    assert re.search(words, str(caught.value)), caught.value
    assert multiprocessing.active_children() == []


def _read_for_ever(connection: Any) -> None:
    loader = loader_of(Numbers(1000), batch_size=1, num_workers=2)
    for _ in prepare(loader):
        connection.send([child.pid for child in multiprocessing.active_children()])
        time.sleep(600)


def test_workers_do_not_outlive_a_process_that_is_killed() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_for_ever, args=(theirs,))
    process.start()
    workers = ours.recv()
    assert len(workers) == 2
    process.kill()
    process.join()
    deadline = time.monotonic() + 60
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_runs, workers))


def _read_late(connection: Any) -> None:
    """Read with workers that look for their parent only when it has been killed."""
    ends_with_parent, parent = workers._end_with_parent, os.getpid()

    def late() -> None:
        connection.send(os.getpid())
        while os.getppid() == parent:
            time.sleep(0.01)
        ends_with_parent()

    workers._end_with_parent = late
    list(prepare(loader_of(Numbers(1000), batch_size=1, num_workers=2)))


def test_workers_that_start_after_their_process_was_killed_end_too() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read_late, args=(theirs,))
    process.start()
    pids = [ours.recv() for _ in range(2)]
    process.kill()
    process.join()
    deadline = time.monotonic() + 60
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.e2e
def test_a_fork_leaves_the_workers_of_forgotten_iterators_alone() -> None:
    script = """
import gc, os, torch, warnings
from torch.utils.data import DataLoader
from trainkit import Accelerator
loader = DataLoader(torch.arange(37), 6, num_workers=2, persistent_workers=True)
batches = iter(Accelerator(cpu=True).prepare(loader))
next(batches)
kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
held = [each for each in gc.get_objects() if issubclass(type(each), kind)]
assert held
warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
del batches, loader
gc.collect()
if os.fork():
    os.wait()
else:
    held.clear()
    gc.collect()
    os._exit(0)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    assert ended.stderr == ""
