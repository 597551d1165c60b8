"""What is left of checkpoints when processes die and disks err."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.behaviour import toys
from benchmarks.behaviour.bench import Bench, Outcome
from benchmarks.behaviour.job import Job, NotOffered
from benchmarks.behaviour.rows import row
from benchmarks.behaviour.toys import Tape
from tests.helpers.ranks import RanksError

SELDOM = 10**6  # updates
POINTS = 6  # at which a save is killed, at most
HALF = toys.BALLAST * 2  # bytes, of the numbers of `toys.Heavy`
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT

CHANGES = {
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink",
    "os.truncate", "shutil.rmtree",
}  # fmt: skip


class Killer:
    """Dies at an operation on files between two updates.

    Args:
        folder: Where the operations must be; relative names count too.
        first: Updates after which operations count, for two updates.
        at: Which one of them is not reached; 0: the middle of writing the first large file; None:
            they are only counted.
    """

    def __init__(self, folder: Path, first: int, at: int | None) -> None:
        self.folder, self.first, self.at = folder, first, at
        self.seen, self.armed = 0, False

    def __call__(self) -> None:
        toys.AFTER_UPDATE.append(self.arm)
        sys.addaudithook(self.look)

    def arm(self, updates: int) -> None:
        self.armed = self.first <= updates < self.first + 2
        if self.at == 0 and self.armed:  # the kernel ends whoever writes more to one file
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (HALF, HALF))

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed or event not in CHANGES:
            return
        if event == "open" and not (arguments[2] or 0) & WRITES:
            return
        path = arguments[0]
        if not isinstance(path, str | bytes | os.PathLike):  # a descriptor
            return
        name = os.fsdecode(path)
        if os.path.isabs(name) and not name.startswith(str(self.folder)):
            return
        self.seen += 1
        if self.at == self.seen:
            toys.kill_me()
        if self.at is None:
            toys.TAPE.first["operations"] = self.seen


def _goes_on(bench: Bench, job: Job, resume: Path | str) -> bool:
    """Whether a new process goes on with what an earlier one has trained."""
    try:
        tape = bench.tapes(job.but(resume=resume, save_every=SELDOM))[0]
    except RanksError:
        return False
    return sum(tape.first.get("weight", [0.0])) < 0


def _killed(bench: Bench, resumes: Callable[[Job], bool], **fields: Any) -> Outcome:
    """Kill a run at each operation of its last save; ask each time whether it can go on."""

    def job() -> Job:
        return bench.job(samples=16, model=toys.Heavy, folder=bench.new_folder(), **fields)

    counting = job()
    assert counting.folder is not None
    tape = bench.tapes(counting, before=Killer(counting.folder, 5, None))[0]
    total = tape.first.get("operations", 0)
    if not total:
        raise NotOffered("it saves nothing")
    points = sorted({0, *(1 + round(i * (total - 1) / (POINTS - 1)) for i in range(POINTS))})
    lost = 0
    for point in points:
        broken = job()
        assert broken.folder is not None
        try:
            bench.tapes(broken, before=Killer(broken.folder, 5, point))
        except RanksError:
            lost += not resumes(broken)
    return Outcome(lost == 0, f"after {lost} of {len(points)} kills it cannot go on")


@row("kill_one", "`kill -9` in a save, one checkpoint kept", "something to load is always left")
def kill_one(bench: Bench) -> Outcome:
    """Killed before up to 6 operations on files and amid a write; any checkpoint may be named."""

    def resumes(job: Job) -> bool:
        assert job.folder is not None
        paths = bench.framework.checkpoints(job.folder)
        return any(_goes_on(bench, job, path) for path in reversed(paths))

    return _killed(bench, resumes, save_every=3, keep=1)


@row("kill_three", "`kill -9` in a save, three kept: resume by itself", "goes on from a good one")
def kill_three(bench: Bench) -> Outcome:
    """Killed in the same way in the third save; the framework is asked for its newest."""
    return _killed(bench, lambda job: _goes_on(bench, job, "auto"), save_every=2, keep=3)


def _largest(path: Path) -> Path:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_size)


@row("torn", "Newest checkpoint cut in half: resume by itself", "goes on from an older one")
def torn(bench: Bench) -> Outcome:
    """The largest file of the newest of three checkpoints loses its second half."""
    folder = bench.new_folder()
    job = bench.job(samples=16, model=toys.Heavy, folder=folder, save_every=2, keep=3)
    bench.tapes(job)
    newest = bench.framework.checkpoints(folder)[-1]
    for path in (newest, *folder.glob("last.ckpt")):
        file = _largest(path)
        os.truncate(file, file.stat().st_size // 2)
    right = _goes_on(bench, job, "auto")
    return Outcome(right, "goes on" if right else "does not go on")


@row("bit_flip", "One flipped bit in a checkpoint", "found")
def bit_flip(bench: Bench) -> Outcome:
    """At 6 places of its largest file, one at a time; it is named for the resume."""
    folder = bench.new_folder()
    job = bench.job(samples=16, model=toys.Heavy, folder=folder, save_every=3)
    bench.tapes(job)
    path = bench.framework.checkpoints(folder)[0]
    if not _goes_on(bench, job, path):
        return Outcome(False, "the whole checkpoint does not load")
    file = _largest(path)
    good = file.read_bytes()
    silent = 0
    for place in range(1, 7):
        bad = bytearray(good)
        bad[len(good) * place // 7] ^= 1
        file.write_bytes(bad)
        silent += _goes_on(bench, job, path)
    return Outcome(silent == 0, f"{silent} of 6 not noticed")


@row("background", "Saves while training goes on", "each holds one moment")
def background(bench: Bench) -> Outcome:
    """40 MB of numbers that grow by 1 in each step, saved in the background at every second one."""
    folder = bench.new_folder()
    options = {"background": True, "asynchronous": True}
    job = bench.job(samples=16, model=toys.VeryHeavy, folder=folder, save_every=2, options=options)
    bench.tapes(job)
    paths = bench.framework.checkpoints(folder)
    # newest first: a run that goes on from an older one replaces those that come after it
    mixed = [path for path in reversed(paths) if not _of_one_moment(bench, job, path)]
    figure = f"{len(mixed)} of {len(paths)} hold a mixture"
    return Outcome(bool(paths) and not mixed, figure)


def _of_one_moment(bench: Bench, job: Job, path: Path) -> bool:
    tape: Tape = bench.tapes(job.but(resume=path, save_every=SELDOM))[0]
    if not tape.first:  # of the last update: there is nothing left to train
        return True
    low, high = tape.first["ballast"]
    return bool(low == high == -round(sum(tape.first["weight"])))
