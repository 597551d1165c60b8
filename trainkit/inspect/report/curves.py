"""Which metrics share a chart, and how a long curve becomes a short one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainkit.basics.formatting import json_value
from trainkit.inspect.report.goodput import throughput
from trainkit.inspect.report.records import DRAWABLE, Point, RunLog

MOST_POINTS = 1200  # of a curve on the page
ALL_POINTS = 150_000  # of all curves: two megabytes
LEAST_POINTS = 50  # of each, however many there are
MOST_MARKS = 200
MOST_CHARTS = 24  # that are shown at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve of one run.

    Args:
        run: Number of the run.
        label: What it is called beside the others in its chart.
        points: Values that can be drawn, thinned out.
        marks: Where the value was not finite or huge, and what it was.
    """

    run: int
    label: str
    points: list[Point]
    marks: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves that are drawn over each other."""

    title: str
    series: list[Series]


_STEP_TIME = "seconds per step"
_TITLES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "time/samples_per_second": "samples per second",
    "time/tokens_per_second": "tokens per second",
    "time/step_seconds_p50": _STEP_TIME,
    "time/step_seconds_p90": _STEP_TIME,
    "time/step_seconds_max": _STEP_TIME,
    "time/data_wait": "share of time waiting for data",
    "time/mfu": "model FLOPs utilisation",
}
_ORDER = list(dict.fromkeys(_TITLES.values()))
_EVALUATION = _ORDER.index("gradient norm") + 0.5  # comes after it


def charts_of(runs: Sequence[RunLog]) -> list[Chart]:
    """Return the charts of some runs, the most asked for first.

    The metrics of one run may share a chart; of several, each has its own, which compares runs.
    """
    grouped: dict[str, list[Series]] = {}
    curves = [(run, *curve) for run, log in enumerate(runs) for curve in _curves(log)]
    most = min(MOST_POINTS, max(LEAST_POINTS, ALL_POINTS // max(1, len(curves))))
    for run, name, points in curves:
        title, label = _chart_and_label(name) if len(runs) == 1 else (name, name)
        good = _short(thin([point for point in points if abs(point[1]) < DRAWABLE], most))
        marks = [(s, str(json_value(v))) for s, v in points if not abs(v) < DRAWABLE]
        series = Series(run=run, label=label, points=good, marks=marks[:MOST_MARKS])
        grouped.setdefault(title, []).append(series)
    return [Chart(title, grouped[title]) for title in sorted(grouped, key=_rank)]


def _curves(run: RunLog) -> Iterator[tuple[str, list[Point]]]:
    yield from run.curves.items()
    if "time/samples_per_second" not in run.curves and (points := throughput(run)):
        yield "time/samples_per_second", points


def _chart_and_label(name: str) -> tuple[str, str]:
    """Return the title of the chart for a metric, and its label there."""
    last = name.rsplit("/", 1)[-1]
    if name.startswith("lr/"):
        return "learning rate", name
    if name in _TITLES:
        return _TITLES[name], name.removeprefix("time/step_seconds_")
    if name.startswith("eval/") and last == "loss":
        return "loss", name
    return (f"evaluation: {last}", name) if name.startswith("eval/") else (name, name)


def _rank(title: str) -> float:
    """Return the place of a chart: loss and rates, evaluation, speed, what users log themselves."""
    title = _TITLES.get(title, title)
    if title in _ORDER:
        return _ORDER.index(title)
    if title.startswith("eval/"):
        return 0.5
    return _EVALUATION if title.startswith("evaluation: ") else len(_ORDER)


def _short(points: Sequence[Point]) -> list[Point]:
    """Return points with the digits that can be seen: 6, or more of values close to each other."""
    values = [value for _, value in points] or [0.0]
    size, span = max(map(abs, values)), max(values) - min(values)
    digits = min(15, max(6, 4 + math.ceil(math.log10(size / span)))) if span > size / 1e15 else 6
    return [(step, float(f"{value:.{digits}g}")) for step, value in points]


def thin(points: list[Point], max_points: int = MOST_POINTS) -> list[Point]:
    """Return at most `max_points` points: the lowest and highest of equal stretches, and both ends.

    So no spike is lost, which every n-th point or a mean would hide.
    """
    if len(points) <= max_points:
        return points
    buckets = max(1, (max_points - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for number in range(buckets):
        stretch = inner[number * len(inner) // buckets : (number + 1) * len(inner) // buckets]
        if stretch:
            ends = {_extreme(stretch, -1), _extreme(stretch, 1)}
            kept += [stretch[index] for index in sorted(ends)]
    return [*kept, points[-1]]


def _extreme(points: Sequence[Point], sign: int) -> int:
    return max(range(len(points)), key=lambda index: sign * points[index][1])
