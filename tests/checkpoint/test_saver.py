"""Saves now and in the background: what is written, who waits, and who hears of a failure."""

import errno
import os
import signal
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint.test_codec import DTYPES, REFUSED, assert_same
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, toy_dataset, toy_model
from trainkit import Callback, CheckpointError, Run, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore, KeepPolicy
from trainkit.checkpoint.io import files
from trainkit.checkpoint.saver import Saver
from trainkit.checkpoint.snapshot import Snapshot
from trainkit.distributed import Processes

Loss = torch.nn.CrossEntropyLoss


def make(directory: Path, *, background: bool = True, keep_last: int | None = 1) -> Saver:
    return Saver(
        directory, Processes.start(), KeepPolicy(keep_last=keep_last), run_id="run",
        goes_on=False, background=background,
    )  # fmt: skip


def steps(saver: Saver) -> list[int]:
    return [entry.step for entry in saver.store.checkpoints()]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what every write in the background waits for."""
    opened, write = threading.Event(), files.write

    def wait_and_write(descriptor: int, data: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # which tries the disk out
            assert opened.wait(240)
        write(descriptor, data)

    monkeypatch.setattr(files, "write", wait_and_write)
    return opened


def fail_with(code: int) -> Callable[[int], None]:
    def sync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    return sync


@pytest.mark.parametrize("background", [False, True])
def test_older_ones_go_only_when_the_new_one_is_there(background: bool, tmp_path: Path) -> None:
    saver = make(tmp_path, background=background)
    for step in (1, 2, 3):
        saver.save(step, {"model": {"w": torch.ones(2)}}, {})
        saver.wait()
        assert steps(saver) == [step]
    saver.close()


def test_what_changes_after_a_background_save_is_not_written(
    gate: threading.Event, tmp_path: Path
) -> None:
    saver = make(tmp_path)
    model: dict[str, Any] = {"w": torch.arange(6.0), "n": [1, 2]}
    for step in (1, 2):
        expected = {"w": model["w"].clone(), "n": [1, 2, *range(3, 2 + step)]}
        assert saver.save(step, {"model": model}, {}) is None
        model["w"].add_(1.0)
        model["n"].append(step + 2)
        assert saver.poll() is None
        gate.set()
        path = saver.wait()
        assert path is not None
        assert_same(saver.store.open(path).read("model"), expected)
    saver.close()


def test_a_second_save_waits_for_the_first(gate: threading.Event, tmp_path: Path) -> None:
    saver = make(tmp_path, keep_last=None)
    saver.save(1, {"model": {"w": torch.ones(2)}}, {})
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    saver.save(2, {"model": {"w": torch.ones(2)}}, {})
    timer.join()
    assert steps(saver)[:1] == [1]
    saver.wait()
    assert steps(saver) == [1, 2]
    saver.close()


def test_a_commit_is_told_once(tmp_path: Path) -> None:
    saver = make(tmp_path)
    saver.save(1, {"model": {"w": torch.ones(2)}}, {})
    told: list[Path] = []
    deadline = time.monotonic() + 240
    while not told and time.monotonic() < deadline:
        told += [path for path in [saver.poll()] if path is not None]
    assert [path.name for path in told] == ["step-00000001"]
    assert saver.poll() is None
    assert saver.wait() is None
    saver.close()


@pytest.mark.parametrize("ask", ["poll", "wait", "save"])
def test_a_failure_in_the_background_is_raised_once_and_harms_nothing(
    ask: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make(tmp_path)
    model = {"model": {"w": torch.ones(2)}}
    saver.save(1, model, {})
    saver.wait()
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", fail_with(errno.ENOSPC))
        saver.save(2, model, {})
        assert saver._job is not None
        saver._job.thread.join()
    asked: Callable[[], Any] = partial(saver.save, 3, model, {}) if ask == "save" else (
        getattr(saver, ask)
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=r"Saving step 2 failed: .*ENOSPC"):
        asked()
    assert saver.poll() is saver.wait() is None
    assert steps(saver) == [1]
    saver.save(3, model, {})
    saver.wait()
    assert steps(saver) == [3]
    saver.close()


def test_a_failure_that_nobody_heard_of_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = make(tmp_path)
    monkeypatch.setattr(files, "sync", fail_with(errno.EIO))
    saver.save(1, {"model": {"w": torch.ones(2)}}, {})
    with pytest.warns(UserWarning, match="Saving step 1 failed"):
        saver.close()


def fail_on_one(rank: int, folder: Path) -> tuple[str, int]:
    saver = make(folder)
    if rank == 1:
        files.sync = fail_with(errno.EIO)  # type: ignore[assignment]
    saver.save(1, {f"part-{rank}": {"w": torch.ones(2)}}, {})
    if rank == 0:
        time.sleep(0.2)  # comes to each poll later than the other
    for count in range(10_000):
        try:
            saver.poll()
        except CheckpointError as error:
            saver.close()
            return str(error), count
        torch.ones(1).add_(1)
    raise AssertionError("nobody heard of the failure")


def test_a_failure_on_one_process_is_raised_by_all_at_the_same_poll(tmp_path: Path) -> None:
    (first, at_first), (second, at_second) = run_ranks(2, fail_on_one, tmp_path)
    assert first == second
    assert "failed on process 1" in first
    assert at_first == at_second


def refuse_on_one(rank: int, folder: Path) -> str:
    saver = make(folder)
    part = {"w": torch.eye(2).to_sparse() if rank == 1 else torch.eye(2)}
    saver.save(1, {f"part-{rank}": part}, {})
    with pytest.raises(CheckpointError) as caught:
        saver.wait()
    saver.close()
    return str(caught.value)


def test_what_cannot_be_kept_is_an_error_on_all(tmp_path: Path) -> None:
    for text in run_ranks(2, refuse_on_one, tmp_path):
        assert "process 1: `part-1.w` is a tensor of layout torch.sparse_coo" in text


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_named_in_the_background_too(name: str, tmp_path: Path) -> None:
    saver = make(tmp_path)
    saver.save(1, {"callbacks": {"MyCallback": {"cache": [0, 1, 2, REFUSED[name]]}}}, {})
    with pytest.raises(CheckpointError, match=r"`callbacks\.MyCallback\.cache\[3\]"):
        saver.wait()
    saver.close()


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
def test_a_snapshot_has_the_types_and_values_of_the_state() -> None:
    raw = torch.arange(240, dtype=torch.uint8)
    state: dict[str, Any] = {
        "dtypes": {str(d): (raw % (2 if d == torch.bool else 255)).view(d).clone() for d in DTYPES},
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "others": [Counter({3: 2}), defaultdict(list, {1: [torch.zeros(())]}), (1, {2}, b"x")],
        "arrays": [np.arange(3), np.float64(0.5), bytearray(b"ab")],
        "views": [torch.arange(6.0).reshape(2, 3).t(), torch.ones(2, dtype=torch.cfloat).conj()],
        "empty": [torch.empty(0, 3), torch.empty(0)],
    }
    snapshot = Snapshot()
    for _ in range(2):
        assert_same(snapshot.take(state), {**state, "views": [v.clone() for v in state["views"]]})
    taken = snapshot.take(state)
    state["arrays"][0][0] = 9
    state["ordered"]["a"].fill_(7)
    assert taken["arrays"][0][0] == 0
    assert taken["ordered"]["a"].eq(1).all()


def test_buffers_are_kept_between_saves_and_shared_tensors_stay_so() -> None:
    model = toy_model()
    optimizer = torch.optim.AdamW(model.parameters())
    snapshot, weight = Snapshot(), torch.ones(4, 4)
    places = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        taken = snapshot.take(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tied": [weight] * 2}
        )
        assert taken["tied"][0] is taken["tied"][1]
        moments = [t for values in taken["optimizer"]["state"].values() for t in values.values()]
        tensors = [*taken["model"].values(), *moments, taken["tied"][0]]
        places.append([tensor.data_ptr() for tensor in tensors])
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == len(places[0])


def test_a_buffer_is_not_used_for_a_tensor_that_has_changed_its_shape_or_type() -> None:
    snapshot, turned = Snapshot(), torch.arange(9.0).reshape(3, 3).t()
    for tensor in (
        torch.ones(2),
        torch.ones(3),
        torch.ones(3, dtype=torch.float64),
        turned,
        turned.contiguous(),
    ):
        taken = snapshot.take({"w": tensor})["w"]
        assert_same(taken, tensor)
        assert taken.stride() == tensor.stride()


class Terminating(Callback):
    """Sends SIGTERM while a save is under way, and lets the writer go on later."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.saved: list[str] = []

    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step == 2:
            assert run.checkpoints.saver is not None
            assert run.checkpoints.saver._job is not None
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.05, self.gate.set).start()

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self.saved.append(path.name)


def test_sigterm_with_a_save_under_way_commits_it_and_the_last_step(
    gate: threading.Event, tmp_path: Path
) -> None:
    terminating = Terminating(gate)
    trainer = Trainer(
        max_steps=5, output_dir=tmp_path,
        callbacks=[terminating, Checkpoint(every_n_steps=1, keep_last=None, background=True)],
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        fit(trainer, DataLoader(toy_dataset(), 4), loss_fn=Loss())
    assert ended.value.code == 143
    assert terminating.saved == ["step-00000001", "step-00000002"]
    newest = CheckpointStore(tmp_path / "checkpoints").newest_valid(print)
    assert newest is not None
    assert newest.step == 2


def test_a_fit_ends_with_the_failure_of_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FillsUp(Callback):
        def on_fit_start(self, run: Run) -> None:  # `fit` itself tries the disk out before
            monkeypatch.setattr(files, "sync", fail_with(errno.ENOSPC))

    callbacks = [Checkpoint(background=True), FillsUp()]
    trainer = Trainer(max_steps=1, output_dir=tmp_path, callbacks=callbacks)
    with pytest.raises(CheckpointError, match="ENOSPC"):
        fit(trainer, DataLoader(toy_dataset(), 4), loss_fn=Loss())
