"""Which figures share a chart, and how a long curve becomes a short one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainkit.run_report.goodput import throughput
from trainkit.run_report.records import Point, RunLog

__all__ = ["Chart", "Series", "charts_of", "thin"]

MOST_POINTS = 1200  # of a curve on the page
MOST_MARKS = 200
DRAWABLE = 1e100  # no axis reaches further
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves that are drawn over each other."""

    title: str
    series: list[Series]
    main: bool  # whether it is shown at once, or only on request


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
    """Return the charts of some runs, the most asked for first."""
    grouped: dict[str, list[Series]] = {}
    for number, run in enumerate(runs):
        for name, points in _figures(run):
            title, label = _place(name)
            good, marks = _split(points)
            series = Series(run=number, label=label, points=thin(good), marks=marks[:MOST_MARKS])
            grouped.setdefault(title, []).append(series)
    return [
        Chart(title=title, series=grouped[title], main=index < MOST_CHARTS)
        for index, title in enumerate(sorted(grouped, key=_rank))
    ]


def _figures(run: RunLog) -> Iterator[tuple[str, list[Point]]]:
    yield from run.figures.items()
    if "time/samples_per_second" not in run.figures and (points := throughput(run)):
        yield "time/samples_per_second", points


def _place(name: str) -> tuple[str, str]:
    """Return the title of the chart for a figure, and its label there."""
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
    if title in _ORDER:
        return _ORDER.index(title)
    return _EVALUATION if title.startswith("evaluation: ") else len(_ORDER)


def _split(points: Sequence[Point]) -> tuple[list[Point], list[tuple[int, str]]]:
    """Return the points that can be drawn, and the others with a word for what they are."""
    good = [point for point in points if abs(point[1]) < DRAWABLE]
    marks = [(step, _word(value)) for step, value in points if not abs(value) < DRAWABLE]
    return good, marks


def _word(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}" if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def thin(points: list[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points: the lowest and the highest of equal stretches, and both ends.

    So no spike is lost, which every n-th point or a mean would hide.
    """
    if len(points) <= most:
        return points
    buckets = max(1, (most - 2) // 2)
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
