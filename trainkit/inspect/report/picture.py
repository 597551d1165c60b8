"""The curves of a report as a picture, for documents and chats; drawn by matplotlib."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from trainkit.errors import ConfigError
from trainkit.inspect.report.curves import Chart, charts_of
from trainkit.inspect.report.records import RunLog

COLUMNS = 3
MOST_CHARTS = 12
MOST_RUNS = 24  # that are named
_COLOURS = ("#2f6fde", "#d9730d", "#0b8f7a", "#b0418f", "#7a5af0", "#8a7500", "#c23b3b", "#52708c")
_DASHES = ("-", "--", ":")


def make_picture(runs: Sequence[RunLog]) -> bytes:
    """Return a PNG with the first charts of some runs."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "A picture needs matplotlib. Install it with `pip install 'trainkit[report]'`, or "
            "leave out `--png`."
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    charts = charts_of(runs)[:MOST_CHARTS]
    rows = max(1, -(-len(charts) // COLUMNS))
    figure = Figure(figsize=(13, 2.6 * rows + 0.7), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    is_named = len(runs) <= MOST_RUNS // 4
    title = ", ".join(run.name for run in runs) if is_named else f"{len(runs)} runs"
    figure.suptitle(_plain(title), fontweight="bold")
    for index, chart in enumerate(charts):
        _draw(figure.add_subplot(rows, COLUMNS, index + 1), chart, runs)
    if len(runs) > 1:
        lines = [line for axes in figure.axes for line in axes.get_lines()]
        named = {line.get_label(): line for line in lines if line.get_gid() == "curve"}
        shown = list(named.values())[:MOST_RUNS]
        figure.legend(handles=shown, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _plain(text: str) -> str:
    """Return text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


def _draw(axes: Any, chart: Chart, runs: Sequence[RunLog]) -> None:
    labels = list(dict.fromkeys(series.label for series in chart.series))
    for series in chart.series:
        look = series.run if len(runs) > 1 else labels.index(series.label)
        axes.plot(
            [step for step, _ in series.points],
            [value for _, value in series.points],
            marker="." if len(series.points) <= 24 else "",
            linewidth=1.3,
            linestyle=_DASHES[look // len(_COLOURS) % len(_DASHES)],
            color=_COLOURS[look % len(_COLOURS)],
            label=_plain(runs[series.run].name if len(runs) > 1 else series.label),
            gid="curve",
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
