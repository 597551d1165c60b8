"""Saves are complete or not there, on one process and on many, whatever fails."""

import errno
import os
import resource
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.crash_states import Recorder
from tests.checkpoint.toys import RUN, Together, parts_of, save_alone
from tests.helpers.ranks import RanksError, run_ranks
from trainkit.checkpoint import CheckpointStore, KeepPolicy, rotate
from trainkit.checkpoint.commit import Agree
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.io import files
from trainkit.distributed import Processes
from trainkit.distributed.collectives import gather_on_main
from trainkit.errors import CheckpointCorrupt, CheckpointError, ConfigError

CHANGES = (
    "make_directory", "create", "write", "sync", "sync_directory", "rename"
)  # fmt: skip
REMOVALS = ("remove_file", "remove_directory")


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_has_the_files_of_the_format(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    path = save_alone(store, 120, metrics={"eval/loss": float("nan")})
    assert path == tmp_path / "run" / "checkpoints" / "step-00000120"
    assert visible(path) == [
        "counters.json",
        "manifest.json",
        "model.safetensors",
        "random-0.json",
    ]
    (entry,) = store.checkpoints()
    assert (entry.path, entry.step, entry.manifest.run_id) == (path, 120, RUN)
    assert entry.manifest.world_size == 1
    assert str(entry.manifest.metadata["metrics"]) == "{'eval/loss': nan}"
    checkpoint = store.open(path)
    assert checkpoint.names() == ["counters", "model", "random-0"]
    assert torch.equal(checkpoint.read("model")["bias"], torch.arange(120, 123))
    with pytest.raises(CheckpointError, match=r"no part 'optimizer', only \['counters'"):
        checkpoint.read("optimizer")


def test_nothing_is_writable_by_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = save_alone(CheckpointStore(tmp_path), 1)
    finally:
        os.umask(before)
    modes = [file.stat().st_mode for file in (path, *path.iterdir())]
    assert not any(mode & (stat.S_IWGRP | stat.S_IWOTH) for mode in modes)


@pytest.mark.parametrize("size", [2, 3])
def test_processes_write_one_checkpoint_together(size: int, tmp_path: Path) -> None:
    stores = [CheckpointStore(tmp_path) for _ in range(size)]
    paths = Together(size).save(stores, 7)
    assert paths == [tmp_path / "step-00000007"] * size
    checkpoint = stores[1].open(paths[0])
    assert checkpoint.manifest.world_size == size
    for rank in range(size):
        assert checkpoint.read(f"random-{rank}")["state"][:2] == [7, rank]
        assert checkpoint.read(process_part(rank))["rank"] == rank
    assert visible(paths[0]) == [
        *("counters.json", "manifest.json", "model.safetensors", "processes.bin"),
        *(f"random-{rank}.json" for rank in range(size)),
    ]
    assert checkpoint.manifest.format_version == 4
    assert stores[0].last_saved == stores[1].checkpoints()[0]
    assert stores[1].last_saved is None


def test_each_byte_of_a_pack_belongs_to_a_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = Together(2).save([store, CheckpointStore(tmp_path)], 7)[0]
    pack = path / "processes.bin"
    content = pack.read_bytes()
    for place, info in store.checkpoints()[0].manifest.files.items():
        if info.pack is not None:
            changed = bytearray(content)
            changed[info.begin + info.bytes - 1] ^= 1
            pack.write_bytes(changed)
            with pytest.raises(
                CheckpointCorrupt, match=f"`{place}` in `processes.bin`: its content"
            ):
                store.open(path)
    for other in (content[:-1], content + b"x"):
        pack.write_bytes(other)
        with pytest.raises(CheckpointCorrupt, match=r"`processes\.bin`: it has"):
            store.open(path)
    pack.unlink()
    with pytest.raises(CheckpointCorrupt, match=r"`processes\.bin` is missing"):
        store.open(path)


def test_what_is_large_or_of_one_process_is_not_packed(tmp_path: Path) -> None:
    def save(rank: int, agree: Agree) -> Path:
        own = {process_part(rank): {"values": torch.ones(1 << 14), "rank": rank}}  # 64 KiB
        return CheckpointStore(tmp_path).save(1, own, metadata={}, agree=agree)

    names = [f"process-0000{rank}.safetensors" for rank in (0, 1)]
    assert visible(Together(2).run(save)[0]) == ["manifest.json", *names, "processes.bin"]
    alone = save_alone(CheckpointStore(tmp_path), 2, {process_part(0): {"rank": 0}})
    assert visible(alone) == ["manifest.json", "process-00000.json"]


def _save_for_real(rank: int, directory: Path) -> list[str]:
    processes = Processes.start()
    store = CheckpointStore(directory)
    agree = partial(gather_on_main, processes)
    path = store.save(5, parts_of(5, rank), metadata={"run_id": RUN}, agree=agree)
    return store.open(path).names()


def test_real_processes_write_one_checkpoint_together(tmp_path: Path) -> None:
    names = run_ranks(2, _save_for_real, tmp_path)
    assert names == [["counters", "model", "random-0", "random-1"]] * 2


def test_a_part_that_two_processes_write_is_an_error_on_both(tmp_path: Path) -> None:
    def save(rank: int, agree: Agree) -> Path:
        return CheckpointStore(tmp_path).save(1, {"x": 1}, metadata={}, agree=agree)

    for error in Together(2).run(save):
        assert isinstance(error, CheckpointError)
        assert "`x.json` is written twice, by process 0 and by process 1" in str(error)
    assert visible(tmp_path) == []


def test_a_state_that_one_process_cannot_write_is_an_error_on_all(tmp_path: Path) -> None:
    def save(rank: int, agree: Agree) -> Path:
        parts = {f"part-{rank}": {"x": object() if rank == 1 else 1}}
        return CheckpointStore(tmp_path).save(1, parts, metadata={}, agree=agree)

    for error in Together(3).run(save):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith("Saving step 1 failed on process 1: `part-1.x` is a")
    assert visible(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", ".hidden", "a\0b", "x" * 117, "caf\u00e9", "Manifest", 3]
)
def test_a_part_with_another_name_is_refused(name: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Give it another name"):
        save_alone(CheckpointStore(tmp_path), 1, {name: 1})


def test_names_that_differ_in_case_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="differ in more than case"):
        save_alone(CheckpointStore(tmp_path), 1, {"ema": 1, "EMA": 2})


@pytest.mark.parametrize("step", [-1, True, 1.0, "1"])
def test_a_step_is_a_whole_number(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`step` must be a whole number"):
        save_alone(CheckpointStore(tmp_path), step, {})


def test_the_same_step_of_the_same_run_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save_alone(store, 3, {"x": 1})
    for value in (2, 3):
        path = save_alone(store, 3, {"x": value})
        assert [entry.path for entry in store.checkpoints()] == [path]
        assert store.open(path).read("x") == value
    assert visible(tmp_path) == ["step-00000003.2"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (save_alone(store, 3) / "counters.json").write_text("{}")
    path = save_alone(store, 3)
    assert [entry.path for entry in store.checkpoints()] == [path]
    assert store.open(path).step == 3


def test_the_same_step_of_another_run_is_an_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save_alone(store, 3)
    with pytest.raises(CheckpointError, match=r"saved by the run 'run-1', but this is 'run-2'"):
        save_alone(store, 3, run_id="run-2")
    assert visible(tmp_path) == ["step-00000003"]


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    broken = save_alone(store, 3)
    (broken / "manifest.json").write_text("{")
    assert store.checkpoints() == []
    path = save_alone(store, 3)
    assert visible(tmp_path) == [broken.name, path.name]
    reports: list[str] = []
    newest = store.newest_valid(reports.append)
    assert newest is not None
    assert newest.path == path
    assert len(reports) == 1
    assert "step-00000003` is broken: `manifest.json`" in reports[0]


def test_order_is_that_of_the_manifest_whatever_names_and_times_say(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step, name in ((9, "a"), (100, "b"), (20, "zzz")):
        path = save_alone(store, step).rename(tmp_path / name)
        os.utime(path, (1e9 / step, 1e9 / step))
    assert [entry.step for entry in store.checkpoints()] == [9, 20, 100]
    newest = store.newest_valid(print)
    assert newest is not None
    assert newest.path.name == "b"


def _failing(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], k: int, code: int
) -> list[str]:
    """Let the k-th of these file operations fail; return the list that the calls are added to."""
    calls: list[str] = []
    for name in names:
        original = getattr(files, name)

        def call(*arguments: Any, _name: str = name, _original: Any = original) -> Any:
            calls.append(_name)
            if len(calls) == k + 1:
                raise OSError(code, os.strerror(code), str(arguments[0]))
            return _original(*arguments)

        monkeypatch.setattr(files, name, call)
    return calls


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_any_operation_that_fails_fails_the_save_on_all_and_harms_nothing(
    code: int, processes: int, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoints"
    for k in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        stores = [CheckpointStore(directory) for _ in range(processes)]
        together = Together(processes)
        together.save(stores, 10)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = _failing(monkeypatch, CHANGES, k, code)
            results = together.save(stores, 20)
        if len(calls) <= k:
            assert results == [directory / "step-00000020"] * processes
            assert k > 10
            return
        for error in results:
            assert isinstance(error, CheckpointError), (k, calls, error)
            assert error.errno == code
            assert f"({errno.errorcode[code]})" in str(error)
            assert "The last committed step is 10." in str(error)
            assert "B are free in" in str(error)
        assert visible(directory) == ["step-00000010"], (k, calls)
        assert stores[0].open(directory / "step-00000010").step == 10
        assert together.save(stores, 20) == [directory / "step-00000020"] * processes
    pytest.fail("the save never ended")


def test_a_removal_that_fails_leaves_nothing_half_visible(tmp_path: Path) -> None:
    for k in range(20):
        store = CheckpointStore(tmp_path / str(k))
        for step in (1, 2):
            save_alone(store, step)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = _failing(monkeypatch, (*CHANGES, *REMOVALS), k, errno.EIO)
            with suppress(CheckpointError):
                rotate(store, KeepPolicy(keep_last=1))
        assert all(store.open(entry.path) for entry in store.checkpoints())
        store.clean()
        if len(calls) <= k:
            assert visible(store.directory) == ["step-00000002"]
            return
    pytest.fail("the removal never ended")


def _die_at(k: int, directory: Path) -> int:
    """Save and rotate in a child that is killed in front of its k-th operation."""
    child = os.fork()
    if child == 0:
        try:
            names = (*CHANGES, *REMOVALS)
            count = 0
            for name in names:
                original = getattr(files, name)

                def call(*arguments: Any, _original: Any = original) -> Any:
                    nonlocal count
                    count += 1
                    if count > k:
                        os.kill(os.getpid(), 9)
                    return _original(*arguments)

                setattr(files, name, call)
            store = CheckpointStore(directory)
            save_alone(store, 2)
            rotate(store, KeepPolicy(keep_last=1))
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    for k in range(100):
        directory = tmp_path / str(k)
        store = CheckpointStore(directory)
        save_alone(store, 1)
        status = _die_at(k, directory)
        newest = store.newest_valid(pytest.fail)
        assert newest is not None
        store.clean()
        assert all(name.startswith("step-") for name in visible(directory))
        assert store.newest_valid(pytest.fail) is not None
        if status == 0:
            assert newest.step == 2
            assert visible(directory) == ["step-00000002"]
            return
    pytest.fail("the child never ended")


def _save_with_a_limit(_: int, directory: Path) -> list[str]:
    store = CheckpointStore(directory)
    save_alone(store, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    try:
        save_alone(store, 2, {"model": {"weight": torch.zeros(100_000)}})
    except CheckpointError as error:
        return [str(error), str(error.file), *visible(directory)]
    return []


def test_the_system_s_own_refusal_names_the_file_and_the_room_it_needs(tmp_path: Path) -> None:
    ((text, file, *names),) = run_ranks(1, _save_with_a_limit, tmp_path)
    assert "File too large (EFBIG)" in text
    assert "needs 4" in text
    assert "The last committed step is 1." in text
    assert file.endswith("model.safetensors")
    assert names == ["step-00000001"]


def _save_while_a_rank_leaves(rank: int, directory: Path) -> None:
    processes = Processes.start()
    store = CheckpointStore(directory)

    def agree(value: Any, action: Callable[[list[Any]], Any]) -> Any:
        if rank == 1 and any(directory.glob(".tmp-*")):
            os._exit(1)
        return gather_on_main(processes, value, action)

    store.save(2, parts_of(2, rank), metadata={"run_id": RUN}, agree=agree)


def test_a_process_that_dies_while_saving_leaves_nothing_visible(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save_alone(store, 1)
    with pytest.raises(RanksError):
        run_ranks(2, _save_while_a_rank_leaves, tmp_path)
    newest = store.newest_valid(pytest.fail)
    assert newest is not None
    assert newest.step == 1


def test_a_tensor_that_grows_while_it_is_saved_is_an_error(tmp_path: Path) -> None:
    weight = torch.zeros(3)

    def agree(value: Any, action: Callable[[list[Any]], Any]) -> Any:
        if len(weight) == 3:
            weight.resize_(5)
        return action([value])

    with pytest.raises(CheckpointError, match="changed while it was being saved"):
        CheckpointStore(tmp_path).save(1, {"m": {"w": weight}}, metadata={}, agree=agree)
    assert visible(tmp_path) == []


def test_metadata_that_has_no_form_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"`metadata\.x` is a tensor, which cannot stand"):
        save_alone(CheckpointStore(tmp_path), 1, x=torch.ones(1))
    assert visible(tmp_path) == []


def test_a_store_that_was_never_used_is_empty(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.checkpoints() == []
    assert store.newest_valid(pytest.fail) is None
    store.clean()
    assert store.pinned() == frozenset()
    assert not store.directory.exists()


def test_each_file_is_synced_once_and_the_names_thrice(tmp_path: Path) -> None:
    recorder = Recorder()
    with recorder.recording():
        store = CheckpointStore(tmp_path / "checkpoints")
        store.save(1, parts_of(1), metadata={})
    kinds = [event.kind for event in recorder.events]
    assert kinds.count("sync") == kinds.count("create") == 4
    assert kinds.count("sync_directory") == 3
    assert kinds[-2:] == ["rename", "sync_directory"]


def test_a_directory_that_cannot_be_written_to_is_found_before_it_is_needed(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.probe()
    assert visible(store.directory) == []
    for k in range(100):
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = _failing(monkeypatch, CHANGES, k, errno.EROFS)
            try:
                store.probe()
                failure = ""
            except CheckpointError as error:
                failure = str(error)
        assert visible(store.directory) == []
        if len(calls) <= k:
            assert failure == ""
            assert k >= 6
            return
        is_new = calls[k] == "make_directory"  # which an existing directory answers, too
        assert is_new or "cannot be written to: [Errno 30] Read-only" in failure
    pytest.fail("the probe never ended")
