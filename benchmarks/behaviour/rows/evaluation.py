"""What an evaluation returns, and what is shown of a training."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.behaviour import scored, toys
from benchmarks.behaviour.bench import Bench, Outcome, short
from benchmarks.behaviour.rows import row


@row("evaluation", "Mean loss over 9 samples on two processes", "4", quick=True)
def evaluation(bench: Bench) -> Outcome:
    """The losses are 0 to 8, in batches of 2 on each process."""
    mean = bench.tapes(bench.job(samples=9), 2, "evaluate")[0].result
    return Outcome(abs(mean - 4) < 1e-6, short(mean))


@row("constant", "Mean of a constant 1 over 3 and 2 batches", "1")
def constant(bench: Bench) -> Outcome:
    """An evaluation of which one process has three batches and the other has two."""
    job = bench.job(samples=5, batch=1, loss=toys.one, data=type(bench.framework).uneven)
    mean = bench.tapes(job, 2, "evaluate")[0].result
    return Outcome(abs(mean - 1) < 1e-6, short(mean))


def _flat(value: Any) -> list[Any]:
    """Return the rows of what was gathered, whatever it is wrapped in."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return [row for part in value.values() for row in _flat(part)]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        if value and all(isinstance(number, int | float) for number in value):
            return [[x for x in value if not math.isnan(x) and x not in (0, -100)]]  # no filling
        return [row for part in value for row in _flat(part)]
    return [value]


def _gathered(bench: Bench, outputs: Any, wanted: list[Any]) -> Outcome:
    rows = _flat(bench.tapes(bench.job(samples=9), 2, "gather", outputs)[0].result)
    if rows == wanted:
        return Outcome(True, f"{len(rows)} rows in order")
    if len(rows) != len(wanted):
        return Outcome(False, f"{len(rows)} rows instead of {len(wanted)}: {str(rows)[:40]}")
    return Outcome(False, f"other rows: {str(rows)[:60]}")


@row(
    "gather_texts",
    "Outputs that are a dict of lists of texts",
    "each sample's, in order",
    quick=True,
)
def gather_texts(bench: Bench) -> Outcome:
    """9 samples on two processes; the step returns {"text": [...]}."""
    return _gathered(bench, toys.texts, [f"sample {number}" for number in range(9)])


@row("gather_ragged", "Outputs that are longer in some batches", "each sample's, in order")
def gather_ragged(bench: Bench) -> Outcome:
    """9 samples on two processes; the step returns rows as long as the longest of its batch."""
    wanted = [[number + 1.0] * (number % 3 + 1) for number in range(9)]
    return _gathered(bench, toys.ragged, wanted)


@row("nan", "A loss that is NaN in the third of six steps", "shown as NaN")
def nan(bench: Bench) -> Outcome:
    """Every step is logged; where one loss is shown for an epoch, that one is looked at."""
    job = bench.job(samples=12, model=toys.TurnsNaN)
    losses = bench.tapes(job, 1, "logged")[0].result
    concerned = losses[2] if len(losses) == 6 else losses[0]
    return Outcome(math.isnan(concerned), "shows " + ", ".join(map(short, losses)))


def _metric(bench: Bench, by_hand: Callable[[Tensor, Tensor], float], **fields: Any) -> Outcome:
    job = bench.job(samples=9, **fields)
    data = job.data(9)
    x, y = (torch.stack(part) for part in zip(*(data[i] for i in range(9)), strict=True))
    wanted = by_hand(job.model(9)(x).detach(), y)
    found = [float(bench.tapes(job, size, "metric")[0].result) for size in (1, 2)]
    right = all(abs(figure - wanted) < 1e-6 for figure in found)
    return Outcome(
        right, " and ".join(map(short, found)) + ("" if right else f", not {short(wanted)}")
    )


@row("auroc", "AUROC of 9 samples, on one and on two processes", "as by hand")
def auroc(bench: Bench) -> Outcome:
    """A metric that wants scores, not classes: the mean over 3 classes, each against the others, by
    torchmetrics or by what the framework has for it.
    """
    return _metric(
        bench,
        scored.area,
        data=scored.Classes,
        model=scored.Logits,
        loss=nn.CrossEntropyLoss(),
        metric="auroc",
    )


@row("segmentation", "Mean IoU of 9 segmented images, likewise", "as by hand")
def segmentation(bench: Bench) -> Outcome:
    """Logits of shape (samples, 3 classes, 4, 6), as `CrossEntropyLoss` takes them."""
    return _metric(
        bench,
        scored.mean_iou,
        data=scored.Masks,
        model=scored.PixelLogits,
        loss=nn.CrossEntropyLoss(),
        metric="iou",
    )


@row("eval_figure", "A figure logged in the evaluation step, two processes", "its mean over all")
def eval_figure(bench: Bench) -> Outcome:
    """9 samples in batches of 2 on each process, in a training; the step logs the mean square of
    its batch's numbers, which are 0 to 8.
    """
    mean = bench.tapes(bench.job(samples=9), 2, "log_in_evaluation")[0].result
    wanted = sum(number**2 for number in range(9)) / 9
    right = abs(mean - wanted) < 1e-4
    return Outcome(right, short(mean) if right else f"{short(mean)}, not {short(wanted)}")
