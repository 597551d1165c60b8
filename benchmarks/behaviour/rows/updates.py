"""What an update is made of: windows, weights, schedules, skipped steps."""

from itertools import zip_longest

from benchmarks.behaviour import toys
from benchmarks.behaviour.bench import Bench, Outcome, short, updates
from benchmarks.behaviour.rows import row


def _sums(steps: list[list[float]]) -> str:
    return ", ".join(short(sum(step)) for step in steps)


@row("last_window", "Last, smaller accumulation window", "divided by its true size", quick=True)
def last_window(bench: Bench) -> Outcome:
    """Two epochs of 6 micro-batches, 4 to an update, each with a gradient of 1."""
    job = bench.job(samples=6, batch=1, accumulation=4, epochs=2)
    steps = bench.tapes(job)[0].steps
    right = len(steps) == 4 and all(abs(sum(step) - 1) < 1e-6 for step in steps)
    return Outcome(right, f"gradients {_sums(steps)}")


@row(
    "kwargs", "Accumulation with a model that takes `**kwargs`", "the mean, as without", quick=True
)
def kwargs(bench: Bench) -> Outcome:
    """Two whole windows of 4, of a model that computes its own mean loss: two updates of 1."""
    job = bench.job(samples=8, batch=1, accumulation=4, options={"with_kwargs": True})
    steps = bench.tapes(job)[0].steps
    right = len(steps) == 2 and all(abs(sum(step) - 1) < 1e-6 for step in steps)
    return Outcome(right, f"gradients {_sums(steps)}")


def _tokens(bench: Bench, size: int) -> Outcome:
    job = bench.job(
        samples=4,
        data=toys.Texts,
        batch=1,
        accumulation=2,
        loss=toys.per_token,
        weigh=toys.tokens,
    )
    steps = bench.tapes(job, size)[0].steps
    counts = [int(toys.tokens(toys.Texts(4)[index][1])) for index in range(4)]
    per_step = 2 * size
    error = 0.0
    for number, step in enumerate(steps):
        members = range(number * per_step, (number + 1) * per_step)
        total = sum(counts[index] for index in members)
        wanted = [counts[index] / total if index in members else 0.0 for index in range(4)]
        gap = sum((a - b) ** 2 for a, b in zip(step, wanted, strict=True)) ** 0.5
        error = max(error, gap / sum(b * b for b in wanted) ** 0.5)
    right = len(steps) == 4 // per_step and error < 1e-6
    return Outcome(right, "exact" if right else f"gradient {error:.0%} off")


@row(
    "tokens_accumulation",
    "Loss per token: micro-batches of unequal length",
    "the big batch's gradient",
)
def tokens_accumulation(bench: Bench) -> Outcome:
    """Windows of 2 texts with 1 and 4, 7 and 3 tokens, against the gradient of both at once."""
    return _tokens(bench, 1)


@row("tokens_processes", "... and over two processes", "the big batch's gradient")
def tokens_processes(bench: Bench) -> Outcome:
    """The same four texts in one window of two processes with 2 micro-batches each."""
    return _tokens(bench, 2)


@row("break_early", "An evaluation in a window, left early", "changes no update")
def break_early(bench: Bench) -> Outcome:
    """6 micro-batches, 4 to an update; after the second an evaluation is left after one batch."""
    job = bench.job(samples=12, accumulation=4)
    broken = updates(bench.tapes(job, 1, "break_early")[0])
    found, wanted = (
        ", ".join(str(len(step)) for step in steps)
        for steps in (broken, updates(bench.tapes(job)[0]))
    )
    figure = f"updates of {found} samples"
    return Outcome(found == wanted, figure if found == wanted else f"{figure} instead of {wanted}")


@row("same_updates", "Same global batch on 1 and 2 processes", "the same updates")
def same_updates(bench: Bench) -> Outcome:
    """Two shuffled epochs of 12 samples: batches of 4 on one process, of 2 on each of two."""
    one = updates(bench.tapes(bench.job(samples=12, shuffle=True, epochs=2, batch=4))[0])
    two = updates(bench.tapes(bench.job(samples=12, shuffle=True, epochs=2, batch=2), 2)[0])
    differ = sum(a != b for a, b in zip_longest(map(set, one), map(set, two)))
    return Outcome(differ == 0, f"{differ} of {len(one)} updates are of other samples")


@row("scheduler", "Learning-rate schedule on two processes", "one step for each update")
def scheduler(bench: Bench) -> Outcome:
    """A schedule of 1, 1/2, 1/3, 1/4 over the four updates of two processes."""
    job = bench.job(samples=16, schedule=_falling)
    rates = bench.tapes(job, 2)[0].rates
    wanted = [_falling(step) for step in range(4)]
    right = len(rates) == 4 and all(abs(a - b) < 1e-6 for a, b in zip(rates, wanted, strict=True))
    return Outcome(right, "rates " + ", ".join(map(short, rates)))


def _falling(step: int) -> float:
    return 1 / (1 + step)


@row("overflow", "fp16 overflow under a fused optimizer", "skipped, and the schedule waits")
def overflow(bench: Bench) -> Outcome:
    """AdamW(fused=True) with a gradient scaler, put in by hand where a framework makes one on GPUs
    only; the second of three updates overflows.
    """
    job = bench.job(
        samples=6,
        model=toys.Overflows,
        optimizer=toys.Fused,
        schedule=_falling,
        overflow=True,
    )
    counted = bench.tapes(job, 1, "skips")[0].result
    return Outcome(counted == 2, f"the schedule counts {counted} of 2 updates")
