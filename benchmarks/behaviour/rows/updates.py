"""What an update is made of: windows, weights, schedules, skipped steps."""

from functools import partial
from itertools import zip_longest

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.behaviour import scored, toys
from benchmarks.behaviour.bench import Bench, Outcome, short, updates
from benchmarks.behaviour.rows import row

EPOCHS, UPDATES = 4, 5  # of a training whose schedule has a unit


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


@row("rows_left_out", "A collate function that leaves rows out", "each row that came counts alike")
def rows_left_out(bench: Bench) -> Outcome:
    """A window of two batches of 4 samples, of which 2 and 4 come: each is a sixth of the mean."""
    job = bench.job(samples=8, batch=4, accumulation=2, collate=toys.without_some)
    steps = bench.tapes(job)[0].steps
    counted = [value for step in steps for value in step if value]
    right = len(steps) == 1 and all(abs(value - 1 / 6) < 1e-6 for value in counted)
    return Outcome(right, f"they count {', '.join(sorted({short(value) for value in counted}))}")


@row("two_terms", "A loss of two means over different items", "the big batch's gradient")
def two_terms(bench: Bench) -> Outcome:
    """Two micro-batches of 4; one mean is over all samples, one over 3 of the first and 1."""
    job = bench.job(samples=8, batch=4, accumulation=2, loss=toys.two_terms, terms=toys.terms)
    (step,) = bench.tapes(job)[0].steps
    wanted = [1 / 8 + (index in (0, 1, 2, 4)) / 4 for index in range(8)]
    error = max(abs(a - b) / b for a, b in zip(step, wanted, strict=True))
    return Outcome(
        error < 1e-6, "exact" if error < 1e-6 else f"a sample counts {error:.0%} more or less"
    )


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


@row("sum_loss", 'Accumulation with `reduction="sum"`', "one big batch's gradient, or refused")
def sum_loss(bench: Bench) -> Outcome:
    """`MSELoss(reduction="sum")`: 3 micro-batches of 2 to an update, against one batch of 6."""
    loss = nn.MSELoss(reduction="sum")
    heard = bench.listen(bench.job(samples=12, accumulation=3, loss=loss))
    if heard.refusal("reduction") is not None:
        return Outcome(not heard.updated, "refused")
    found = heard.tapes[0].steps
    wanted = [[-2.0 * i if i // 6 == step else 0.0 for i in range(12)] for step in range(2)]
    ratios = {
        round(a / b, 6)
        for ours, theirs in zip(found, wanted, strict=True)
        for a, b in zip(ours, theirs, strict=True)
        if b
    }
    figure = "gradients " + " and ".join(f"{short(ratio)} times as large" for ratio in ratios)
    return Outcome(ratios == {1.0}, "exact" if ratios == {1.0} else figure)


@row(
    "contrastive",
    "A contrastive loss over two processes' embeddings",
    "the gradient of one process",
)
def contrastive(bench: Bench) -> Outcome:
    """InfoNCE of 8 embeddings in fp64, 4 on each process, each against those that the framework's
    gather returns, with its switch for gradients if it has one; one update.
    """
    job = bench.job(samples=8, batch=4, model=scored.Embeddings)
    [step] = bench.tapes(job, 2, "contrast")[0].steps
    model, numbers = job.model(8), torch.arange(8)
    embeddings = model.weight.view(8, -1)
    toys.contrastive(embeddings, numbers, embeddings, numbers).backward()
    wanted = model.weight.grad
    gap = float((torch.tensor(step, dtype=torch.float64) - wanted).norm() / wanted.norm())
    return Outcome(gap < 1e-12, "exact" if gap < 1e-12 else f"gradient {gap:.0%} off")


@row("schedule_unit", "A cosine schedule whose `T_max` has the wrong unit", "refused or named")
def schedule_unit(bench: Bench) -> Outcome:
    """4 epochs of 5 updates, with `T_max=4` and with `T_max=20`: where the schedule moves with each
    update the first is wrong, where it moves with each epoch the second.
    """
    words, right, fits = [], True, 0
    for length, unit in ((EPOCHS, "epochs"), (EPOCHS * UPDATES, "updates")):
        cosine = partial(CosineAnnealingLR, T_max=length)
        heard = bench.listen(bench.job(samples=2 * UPDATES, epochs=EPOCHS, make_scheduler=cosine))
        if heard.refusal("T_max", "schedul") is not None:
            right = right and not heard.updated
            words.append(f"T_max in {unit}: refused")
            continue
        rates = heard.tapes[0].rates
        if rates == sorted(rates, reverse=True) and rates[-1] < 0.2:
            fits += 1
            words.append(f"T_max in {unit}: falls to {short(rates[-1])}")
            continue
        named = heard.names("T_max")
        right = right and named
        words.append(f"T_max in {unit}: {_course(rates)}, {'named' if named else 'not a word'}")
    return Outcome(right and fits == 1, "; ".join(words))


def _course(rates: list[float]) -> str:
    lowest = min(rates)
    if rates[-1] == lowest:
        return f"falls to {short(lowest)} only"
    return f"{short(lowest)} at update {rates.index(lowest) + 1} of {len(rates)}, then rises"
