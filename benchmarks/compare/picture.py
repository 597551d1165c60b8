"""The picture: the ratio to the loop by hand, for each workload and peer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare.measure import RAW
from benchmarks.compare.rows import Row
from benchmarks.compare.workload import Workload

__all__ = ["draw"]

OURS, OURS_COLOUR = "trainkit", "#d62728"
MARKERS = "osD^vP*X"
COLOURS = ("#1f77b4", "#17becf", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f", "#bcbd22")
TICKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50)


def draw(path: Path, workloads: Sequence[Workload], rows: Sequence[Row]) -> None:
    """Write the picture; a row of dots with their range for each workload."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.is_measured and row.ratios and row.peer != RAW]
    peers = list(dict.fromkeys(row.peer for row in shown))
    figure = Figure(figsize=(10, 1.8 + 0.62 * len(workloads)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    height = {workload.name: -number for number, workload in enumerate(workloads)}
    for number, peer in enumerate(peers):
        _dots(axes, [row for row in shown if row.peer == peer], height, number, len(peers))
    axes.axvline(1, color="black", linewidth=1, zorder=1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(list(height.values()), [f"{w.name}\n{w.about}" for w in workloads], fontsize=8)
    for place in height.values():
        axes.axhline(place - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    axes.grid(axis="x", color="#eeeeee", zorder=0)
    axes.set_xlabel("time, as a ratio to a loop written by hand (left is faster)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=min(len(peers), 5) or 1, frameon=False)
    figure.savefig(path, dpi=150)


def _dots(axes: Any, rows: Sequence[Row], height: dict[str, int], number: int, peers: int) -> None:
    """Draw one peer; peers are shifted a little so that none hides another."""
    is_ours = rows[0].peer == OURS
    shift = 0.35 - 0.7 * number / max(peers - 1, 1)
    places = [height[row.workload] + shift for row in rows]
    colour = OURS_COLOUR if is_ours else COLOURS[number % len(COLOURS)]
    lows = [min(row.ratios) for row in rows]
    highs = [max(row.ratios) for row in rows]
    axes.hlines(places, lows, highs, color=colour, linewidth=1.2, alpha=0.5)
    axes.scatter(
        [row.ratio for row in rows],
        places,
        s=60 if is_ours else 26,
        color=colour,
        marker="o" if is_ours else MARKERS[number % len(MARKERS)],
        label=rows[0].peer,
        zorder=3 if is_ours else 2,
    )
