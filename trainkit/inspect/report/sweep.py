"""What a page says of several runs side by side: best values, what was varied, how far each was."""

import math
import re
from collections.abc import Sequence
from typing import Any

from trainkit.basics.formatting import json_value
from trainkit.inspect.report.goodput import progress
from trainkit.inspect.report.records import Point, RunLog, as_number, mapping
from trainkit.inspect.report.tables import Row, configuration

_SETTINGS = ("optimizer", "config", "run")
_LOW = frozenset(
    ["loss", "error", "perplexity", "ppl", "nll", "mse", "mae", "rmse", "wer", "cer", "bpb", "bpc"]
)
_EVALUATION = re.compile(r"eval|val|test")


def metrics(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Return for each metric and run the lowest, highest and last value, each with its step.

    The first is the one to judge by: that of `keep_best`, else one of an evaluation, where half as
    many runs have it as have any.
    `is_low`, whether lower is better, is what the runs say, else a guess from the name. Times are
    left out.
    """
    names = dict.fromkeys(name for run in runs for name in run.curves)
    owners = {name: sum(name in run.curves for run in runs) for name in names}
    most = max(owners.values(), default=0)
    known = {name: not higher for run in runs for name, higher in run.higher_is_better.items()}
    chosen = {run.keep_best for run in runs}

    def rank(name: str) -> tuple[bool, bool, bool, int]:
        is_wanted = bool(_EVALUATION.match(name)) and 2 * owners[name] >= most
        is_rate = name == "lr" or name.startswith("lr/")
        return name not in chosen, not is_wanted, is_rate, -owners[name]

    return [
        {
            "name": name,
            "is_low": known.get(name, not _LOW.isdisjoint(re.split(r"[\W_]+", name.lower()))),
            **_ends([run.curves.get(name, []) for run in runs]),
        }
        for name in sorted(names, key=rank)
        if not name.startswith("time/")
    ]


def _ends(curves: Sequence[Sequence[Point]]) -> dict[str, list[Any]]:
    finite = [[(value, at) for at, value in points if math.isfinite(value)] for points in curves]
    return {
        "low": [min(points, default=None) for points in finite],
        "high": [max(points, key=lambda point: point[0], default=None) for points in finite],
        "last": [(json_value(curve[-1][1]), curve[-1][0]) if curve else None for curve in curves],
    }


def varied(runs: Sequence[RunLog]) -> list[Row]:
    """Return the hyperparameters that differ between runs; where none does, their settings.

    A setting that only repeats another, as the window does the batch size, is left out.
    """
    groups = configuration(runs)
    rows = [row for row in groups.get("hparams", []) if row.differs]
    settings = [row for group in _SETTINGS for row in groups.get(group, []) if row.differs]
    return rows or list({tuple(row.values): row for row in reversed(settings)}.values())[::-1]


def axes(run: RunLog, most: int) -> dict[str, list[Point]]:
    """Return what else than the step a curve may be drawn over: points of step and value.

    `time` is in seconds of running time. An axis on which a run does not move is left out.
    """
    known = progress(run)
    samples: list[Point] = [(step, seen) for step, seen, _ in known]
    size = as_number(mapping(run.facts.get("run")).get("samples per epoch"))
    if size > 0:
        epochs = [(step, round(seen / size, 6)) for step, seen in samples]
    else:  # when each was first seen to be complete
        ends: dict[float, int] = {}
        for at in run.progress:
            ends.setdefault(at.epoch, at.step)
        epochs = [(0 if epoch == 0 else step, epoch) for epoch, step in ends.items()]
    times = [(step, round(seconds, 3)) for step, _, seconds in known]
    units = {"time": times, "epoch": epochs, "samples": samples}
    return {
        name: points[:: -(-len(points) // most)] + points[-1:]
        for name, points in units.items()
        if any(value > 0 for _, value in points)
    }
