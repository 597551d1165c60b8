"""Whatever the moment of a power cut, what was acknowledged is there and what is there is whole."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.crash_states import Disk, Op, Promise, Recorder, Trace, materialise, states
from tests.checkpoint.toys import Together
from tests.helpers.tiers import with_few
from trainkit.checkpoint import CheckpointStore, KeepPolicy, rotate
from trainkit.checkpoint.listing import folders
from trainkit.errors import CheckpointError

CASES = [(1, 1), (1, 2), (3, 2)]


def record(root: Path, keep: int, processes: int) -> Trace:
    """Save, replace, pin and rotate in `root`, and return what that did to the disk."""
    root.mkdir()
    directory = root / "run" / "checkpoints"
    stores = [CheckpointStore(directory) for _ in range(processes)]
    together = Together(processes)
    recorder = Recorder()
    with recorder.recording():
        for step in (1, 2, 3, 3, 4, 5):
            path = together.save(stores, step)[0]
            assert isinstance(path, Path), path
            recorder.acknowledge("step", step, path)
            rotate(stores[0], KeepPolicy(keep_last=keep))
            if step == 3 and not stores[0].pinned():
                stores[0].pin(3)
                recorder.acknowledge("pins", {3})
        recorder.acknowledge("pins", ())  # from here on either is right
        stores[0].unpin(3)
    return Trace.of(recorder.events, root)


Opened = dict[Disk, int | str]
"""The step of a folder's checkpoint, or what is wrong with it: each is opened once."""


def problem_of(disk: Disk, promise: Promise, root: Path, opened: Opened) -> str:
    """Return what is wrong with a state, or nothing."""
    root.mkdir()
    try:
        materialise(disk, root)
        store = CheckpointStore(root / "run" / "checkpoints")
        found = [_opened(disk, store, path, root, opened) for path in folders(store.directory)]
        return _problem(store, promise, found)
    finally:
        shutil.rmtree(root)


def _opened(
    disk: Disk, store: CheckpointStore, path: Path, root: Path, opened: Opened
) -> int | str:
    place = str(path.relative_to(root))
    content = frozenset(item for item in disk if item[0].startswith(place))
    if content not in opened:
        try:
            opened[content] = store.open(path).step
        except CheckpointError as error:
            opened[content] = f"visible, but broken: {error}"
    return opened[content]


def _problem(store: CheckpointStore, promise: Promise, found: list[int | str]) -> str:
    for broken in found:
        if isinstance(broken, str):
            return broken
    valid = set(found)
    if not promise.steps <= valid:
        return f"{sorted(promise.steps)} were promised, but {sorted(valid)} are there"
    newest = store.newest_valid(print)
    if promise.newest is not None and (newest is None or newest.step < promise.newest):
        return f"step {promise.newest} was acknowledged, but {newest} is the newest"
    try:
        pinned = store.pinned()
    except CheckpointError as error:
        return str(error)
    return "" if promise.pins <= pinned else f"{promise.pins} were pinned, but {pinned} are"


def first_problem(trace: Trace, root: Path) -> tuple[str, int]:
    """Return the first problem of all states, or nothing; and how many states were looked at."""
    seen: set[tuple[Disk, Promise]] = set()
    opened: Opened = {}
    count = 0
    for disk, promise in states(trace):
        count += 1
        if (disk, promise) in seen:
            continue
        seen.add((disk, promise))
        problem = problem_of(disk, promise, root, opened)
        if problem:
            return problem, count
    return "", count


@pytest.mark.parametrize(("keep", "processes"), with_few([], CASES))
def test_no_power_cut_loses_or_breaks_a_checkpoint(
    keep: int, processes: int, tmp_path: Path
) -> None:
    trace = record(tmp_path / "recorded", keep, processes)
    problem, count = first_problem(trace, tmp_path / "state")
    assert not problem
    assert count >= 2000


def _without(role: str) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [op for op in ops if op.role != role]


def _publish_first(ops: list[Op]) -> list[Op]:
    """Rename before the manifest is written."""
    return _earlier(ops, "commit", "create manifest")


def _acknowledge_first(ops: list[Op]) -> list[Op]:
    """Acknowledge before the names in the directory are safe."""
    return _earlier(ops, "ack", "sync after commit")


def _remove_first(ops: list[Op]) -> list[Op]:
    """Remove the old checkpoint before the new one is published."""
    return _earlier(ops, "removal", "commit")


def _earlier(ops: list[Op], late: str, early: str) -> list[Op]:
    """Move each operation of role `late` in front of the last one of role `early` before it."""
    moved: list[Op] = []
    for op in ops:
        if op.role == late:
            places = [index for index, other in enumerate(moved) if other.role == early]
            moved.insert(places[-1] if places else len(moved), op)
        else:
            moved.append(op)
    return moved


def roles(trace: Trace) -> list[str]:
    """Return the roles of all operations that make something last."""
    return sorted({op.role for op in trace.ops if op.kind in ("sync", "sync_directory")})


@pytest.mark.e2e
def test_each_sync_that_is_left_out_loses_or_breaks_a_checkpoint(tmp_path: Path) -> None:
    trace = record(tmp_path / "recorded", keep=1, processes=2)
    assert len(roles(trace)) >= 8
    for role in roles(trace):
        mutant = dataclasses.replace(trace, ops=_without(role)(trace.ops))
        assert first_problem(mutant, tmp_path / "state")[0], f"nothing depends on: {role}"


@pytest.mark.parametrize(
    "mutate",
    with_few(
        [_publish_first],
        [_publish_first, _acknowledge_first, _remove_first, _without("removal")],
    ),
    ids=["publish first", "acknowledge first", "remove first", "no trash"],
)
def test_each_other_order_loses_or_breaks_a_checkpoint(
    mutate: Callable[[list[Op]], list[Op]], tmp_path: Path
) -> None:
    trace = record(tmp_path / "recorded", keep=1, processes=1)
    mutant = dataclasses.replace(trace, ops=mutate(trace.ops))
    assert mutant.ops != trace.ops
    assert first_problem(mutant, tmp_path / "state")[0]
