"""Going on from a checkpoint as if nothing had been."""

from typing import Any

from benchmarks.behaviour.bench import Bench, Outcome, updates
from benchmarks.behaviour.job import Job
from benchmarks.behaviour.rows import row
from benchmarks.behaviour.toys import Tape


def _resumed(bench: Bench) -> tuple[Tape, Tape]:
    """Return what a whole run saw, and one resumed from its checkpoint after three updates."""
    folder = bench.new_folder()
    job = bench.job(samples=10, shuffle=True, epochs=2, folder=folder, save_every=3)
    whole = bench.tapes(job)[0]
    first = bench.framework.checkpoints(folder)[0]
    return whole, bench.tapes(_again(job, first))[0]


def _again(job: Job, path: object) -> Job:
    return job.but(resume=path, save_every=10**6)


def _same(ours: list[Any], wanted: list[Any], what: str) -> Outcome:
    if len(ours) != len(wanted):
        return Outcome(False, f"{len(ours)} {what} instead of {len(wanted)}")
    differ = sum(a != b for a, b in zip(ours, wanted, strict=True))
    return Outcome(differ == 0, f"{differ} of {len(wanted)} {what} differ")


@row("resume_order", "Resume in an epoch: which samples come", "those that are left")
def resume_order(bench: Bench) -> Outcome:
    """10 samples shuffled, two epochs of 5 updates, a new process goes on after the third."""
    whole, resumed = _resumed(bench)
    wanted, found = ([sorted(u) for u in updates(tape)] for tape in (whole, resumed))
    return _same(found, wanted[3:], "updates")


@row("resume_augmentation", "Resume in an epoch: random augmentation", "as if never stopped")
def resume_augmentation(bench: Bench) -> Outcome:
    """The same; each sample draws a number when it is fetched."""
    whole, resumed = _resumed(bench)
    return _same(resumed.inputs, whole.inputs[6:], "samples")


@row("elastic", "Resume on another number of processes", "the samples that are left, in order")
def elastic(bench: Bench) -> Outcome:
    """16 samples shuffled; after 2 of 4 updates one process goes on for two, in batches of 4."""
    folder = bench.new_folder()
    job = bench.job(samples=16, shuffle=True, folder=folder, save_every=2)
    wanted = [sorted(step) for step in updates(bench.tapes(job, 2)[0])]
    first = bench.framework.checkpoints(folder)[0]
    resumed = bench.tapes(_again(job, first).but(batch=4))[0]
    found = [sorted(step) for step in updates(resumed)]
    return _same(found, wanted[2:], "updates")
