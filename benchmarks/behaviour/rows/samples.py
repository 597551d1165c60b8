"""Which samples are trained on, by whom, and with which random parts."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch.utils.data import Sampler
from typing_extensions import override

from benchmarks.behaviour import toys
from benchmarks.behaviour.bench import Bench, Outcome, short, updates
from benchmarks.behaviour.job import NotOffered
from benchmarks.behaviour.rows import row

BATCHES = [[0, 1, 2], [3, 4], [5], [6, 7, 8, 9]]


class Odd(Sampler[int]):
    """Only samples with odd numbers."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // 2

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(1, len(self.data), 2))


class OwnBatches(Sampler[list[int]]):
    """Batches of the user's making."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(BATCHES)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        return iter(BATCHES)


def _once(steps: list[dict[int, float]], wanted: set[int]) -> Outcome:
    """Whether each sample counts once, and as much as the others of its update."""
    seen = Counter(sample for step in steps for sample in step)
    for step in steps:  # twice in one update
        least = min(step.values())
        seen.update(sample for sample, value in step.items() if value > 1.9 * least)
    twice = sorted(sample for sample, count in seen.items() if count > 1)
    never, others = wanted - set(seen), set(seen) - wanted
    uneven = [step for step in steps if max(step.values()) > 1.001 * min(step.values())]
    if twice or never or others:
        parts = [f"{len(twice)} twice"] * bool(twice) + [f"{len(never)} never"] * bool(never)
        parts += [f"{len(others)} others"] * bool(others)
        return Outcome(False, f"of {len(wanted)} samples " + ", ".join(parts))
    if uneven:
        values = " and ".join(short(v) for v in sorted(set(uneven[0].values())))
        return Outcome(False, f"each once, but with weights {values} in one update")
    sums = [sum(step.values()) for step in steps]
    if any(abs(total - 1) > 1e-3 for total in sums):
        return Outcome(False, "each once, but updates of weight " + ", ".join(map(short, sums)))
    return Outcome(True, f"{len(wanted)} samples once")


@row("each_once", "9 samples, 2 processes: an epoch of training", "each sample counts once")
def each_once(bench: Bench) -> Outcome:
    """Batches of 2 on each process; the gradients say how often and how much a sample counts."""
    job = bench.job(samples=9)
    return _once(updates(bench.tapes(job, 2)[0]), set(range(9)))


@row("small", "Fewer samples than processes", "trains and evaluates on what there is")
def small(bench: Bench) -> Outcome:
    """One sample on three processes: one update with a gradient of 1; then an evaluation."""
    job = bench.job(samples=1)
    steps = bench.tapes(job, 3)[0].steps
    if [weight for step in steps for weight in step] != [1.0]:
        return Outcome(False, f"{len(steps)} updates: {steps}")
    with suppress(NotOffered):
        bench.tapes(job, 3, "evaluate")
    return Outcome(True, "one update with a gradient of 1")


@row("custom_sampler", "A sampler of one's own on two processes", "kept and shared out")
def custom_sampler(bench: Bench) -> Outcome:
    """A sampler of the 8 odd ones of 16 samples."""
    job = bench.job(samples=16, sampler=Odd)
    return _once(updates(bench.tapes(job, 2)[0]), set(range(1, 16, 2)))


@row("custom_batches", "A batch sampler of one's own on two processes", "its batches, each once")
def custom_batches(bench: Bench) -> Outcome:
    """Batches of 3, 2, 1 and 4 samples, two to an update."""
    job = bench.job(samples=10, sampler=OwnBatches, batches=True)
    steps = [set(step) for step in updates(bench.tapes(job, 2)[0])]
    whole = [[i for i, batch in enumerate(BATCHES) if set(batch) <= step] for step in steps]
    samples = [sorted(sample for i in found for sample in BATCHES[i]) for found in whole]
    if len(steps) != 2:
        return Outcome(False, f"{len(steps)} updates, of {' / '.join(map(_list, steps))}")
    right = samples == [sorted(step) for step in steps]
    right = right and sorted(i for found in whole for i in found) == [0, 1, 2, 3]
    return Outcome(right, " / ".join(map(_list, steps)))


def _list(step: set[int]) -> str:
    return ",".join(map(str, sorted(step)))


@row("iterable", "Iterable data on 2 processes with 2 workers each", "each sample once")
def iterable(bench: Bench) -> Outcome:
    """A stream of 16 samples that knows nothing of processes and workers."""
    fields = {"data": toys.Stream, "workers": 2}
    job = bench.job(samples=16, **fields)
    return _once(updates(bench.tapes(job, 2)[0]), set(range(16)))


@row("rank_augmentation", "Random augmentation on two processes", "differs from sample to sample")
def rank_augmentation(bench: Bench) -> Outcome:
    """8 samples that draw a number when they are fetched; the run is seeded as documented."""
    tapes = bench.tapes(bench.job(samples=8), 2)
    drawn = [part for tape in tapes for _, part in tape.inputs]
    figure = f"{len(set(drawn))} different numbers of {len(drawn)}"
    return Outcome(len(set(drawn)) == len(drawn) == 8, figure)
