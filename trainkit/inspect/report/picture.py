"""The curves of a report as a picture, for documents and chats; drawn by matplotlib."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from trainkit.basics.formatting import duration
from trainkit.errors import ConfigError
from trainkit.inspect.report.curves import Chart, charts_of
from trainkit.inspect.report.goodput import PARTS, Goodput, goodput
from trainkit.inspect.report.records import RunLog

__all__ = ["make_picture"]

COLUMNS = 3
MOST_CHARTS = 12
MOST_RUNS = 24  # that are named
_COLOURS = ("#2f6fde", "#d9730d", "#0b8f7a", "#b0418f", "#7a5af0", "#8a7500", "#c23b3b", "#52708c")
_OF_PARTS = dict(
    zip(
        PARTS,
        ("#2e9e6b", "#e0a526", "#3f8fd6", "#8667d6", "#d0443b", "#8b97a8", "#b3bcc9", "#d7dce4"),
        strict=True,
    )
)
_DASHES = ("-", "--", ":")


def make_picture(runs: Sequence[RunLog]) -> bytes:
    """Return a PNG with where the time went and the first charts of some runs.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "A picture needs matplotlib. Install it with `pip install 'trainkit[report]'`, or "
            "leave out `--png`."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = charts_of(runs)[:MOST_CHARTS]
    splits = [(run.name, split) for run in runs if (split := goodput(run)) is not None]
    splits = splits[:MOST_RUNS]
    rows = -(-len(charts) // COLUMNS)
    heights = [*([0.5 + 0.35 * len(splits)] if splits else []), *([2.6] * rows)] or [1.0]
    figure = Figure(figsize=(13, sum(heights) + 0.7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    is_named = len(runs) <= MOST_RUNS // 4
    title = ", ".join(run.name for run in runs) if is_named else f"{len(runs)} runs"
    figure.suptitle(_plain(title), fontweight="bold")
    grid = figure.add_gridspec(len(heights), COLUMNS, height_ratios=heights)
    if splits:
        _draw_time(figure.add_subplot(grid[0, :]), splits)
    for index, chart in enumerate(charts):
        row, column = divmod(index, COLUMNS)
        _draw_chart(figure.add_subplot(grid[row + bool(splits), column]), chart, runs)
    if len(runs) > 1:
        lines = [line for axes in figure.axes for line in axes.get_legend_handles_labels()[0]]
        named = {line.get_label(): line for line in lines if hasattr(line, "get_linestyle")}
        shown = list(named.values())[:MOST_RUNS]
        figure.legend(handles=shown, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _plain(text: str) -> str:
    """Return text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


def _draw_time(axes: Any, splits: Sequence[tuple[str, Goodput]]) -> None:
    shown = dict.fromkeys(part for _, split in splits for part, s in split.parts.items() if s > 0)
    totals = [split.running or 1.0 for _, split in splits]
    left = [0.0] * len(splits)
    divided = all(split.divided for _, split in splits)
    words = PARTS if divided else PARTS | {"step": "training, undivided"}
    for part in shown:
        widths = [
            100 * split.seconds[part] / total
            for (_, split), total in zip(splits, totals, strict=True)
        ]
        axes.barh(range(len(splits)), widths, left=left, color=_OF_PARTS[part], label=words[part])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    names = [
        f"{_plain(name)}, {duration(total)}"
        for (name, _), total in zip(splits, totals, strict=True)
    ]
    axes.set_yticks(range(len(splits)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the running time", fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(
        ncols=len(shown), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8
    )


def _draw_chart(axes: Any, chart: Chart, runs: Sequence[RunLog]) -> None:
    labels = list(dict.fromkeys(series.label for series in chart.series))
    for series in chart.series:
        look = series.run if len(runs) > 1 else labels.index(series.label)
        steps, values = [step for step, _ in series.points], [value for _, value in series.points]
        axes.plot(
            steps,
            values,
            marker="." if len(steps) <= 24 else "",
            linewidth=1.3,
            linestyle=_DASHES[look // len(_COLOURS) % len(_DASHES)],
            color=_COLOURS[look % len(_COLOURS)],
            label=_plain(runs[series.run].name if len(runs) > 1 else series.label),
        )
        for step, _ in series.marks:
            axes.axvline(step, color="#d0342c", linewidth=0.8, linestyle=":")
    for run in {series.run for series in chart.series}:
        for step in runs[run].resumes:
            axes.axvline(step, color="#667085", linewidth=0.8, linestyle="--")
        skips = sorted(set(runs[run].skips))
        bottom = axes.get_xaxis_transform()
        axes.plot(skips, [0.02] * len(skips), "|", color="#d0342c", transform=bottom)
    axes.set_title(_plain(chart.title), fontsize=10, fontweight="bold", loc="left")
    axes.grid(axis="y", color="#e3e6ec")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("step", fontsize=8)
    if len(labels) > 1:
        axes.legend(fontsize=7, frameon=False)
