"""The page of a report: one HTML file that needs nothing else, from disk or from a server."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files

from trainkit.formatting import duration
from trainkit.run_report.curves import MOST_CHARTS, Chart, charts_of
from trainkit.run_report.goodput import PARTS, Goodput, goodput
from trainkit.run_report.records import RunLog
from trainkit.run_report.tables import Row, configuration, last_values, sessions, summary

__all__ = ["make_page"]

MOST_SKIPS = 60  # that are listed by step
LEAST_SHARE = 0.0005  # of the time that is told in words
_SESSIONS = [
    "started",
    "from step",
    "until step",
    "ran",
    "ended by",
    "done again",
    "down before",
]


def make_page(runs: Sequence[RunLog]) -> str:
    """Return the page for some runs as text."""
    splits = [goodput(run) for run in runs]
    charts = charts_of(runs)
    title = ", ".join(run.name for run in runs)
    body = [
        _header(runs),
        _overview(runs, splits),
        _goodput(runs, splits),
        _curves(charts),
        _events(runs, splits),
        _last_values(runs),
        _configuration(runs),
        _notes(runs),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)} - trainkit report</title>",
            f"<style>{_asset('page.css')}</style></head><body><main>",
            *(part for part in body if part),
            f'</main><script type="application/json" id="data">{_data(runs, charts)}</script>',
            f"<script>{_asset('page.js')}</script></body></html>\n",
        ]
    )


def _asset(name: str) -> str:
    return (files("trainkit.run_report") / name).read_text(encoding="utf-8")


def _data(runs: Sequence[RunLog], charts: Sequence[Chart]) -> str:
    """Return the curves as JSON that cannot end the element that it stands in."""
    data = {
        "runs": [{"name": run.name, "resumes": run.resumes, "skips": run.skips} for run in runs],
        "charts": [asdict(chart) for chart in charts],
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _header(runs: Sequence[RunLog]) -> str:
    names = "".join(
        f'<li><button class="run" data-run="{index}" style="--c:var(--s{index % 8})">'
        f"{escape(run.name)}</button></li>"
        for index, run in enumerate(runs)
    )
    heading = escape(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"
    listed = "" if len(runs) == 1 else f'<ul class="runs">{names}</ul>'
    made = time.strftime("%Y-%m-%d %H:%M")
    return (
        f'<header><div><p class="kicker">trainkit report, {made}</p><h1>{heading}</h1></div>'
        f'<button id="theme" title="light or dark">light / dark</button></header>{listed}'
    )


def _overview(runs: Sequence[RunLog], splits: Sequence[Goodput | None]) -> str:
    rows = [dict(summary(run, split)) for run, split in zip(runs, splits, strict=True)]
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{_breakable(name)}</dt><dd>{_breakable(value)}</dd></div>"
            for name, value in rows[0].items()
        )
        return f'<dl class="tiles">{tiles}</dl>'
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [
        [run.name, *(row.get(name, "") for name in names)]
        for run, row in zip(runs, rows, strict=True)
    ]
    return _card("Runs", _table(["run", *names], cells))


def _goodput(runs: Sequence[RunLog], splits: Sequence[Goodput | None]) -> str:
    bars = [
        _bar(run.name if len(runs) > 1 else "", split)
        for run, split in zip(runs, splits, strict=True)
        if split is not None
    ]
    if not bars:
        return _card("Where the time went", f'<p class="hint">{_NO_EVENTS}</p>')
    undivided = any(split is not None and not split.divided for split in splits)
    hint = f'<p class="hint">{_UNDIVIDED}</p>' if undivided else ""
    return _card("Where the time went", "".join(bars) + hint)


_NO_EVENTS = (
    "Not known: the run wrote no events. <code>JSONLLogger</code> writes them beside "
    "<code>metrics.jsonl</code>."
)
_UNDIVIDED = (
    "Training is not divided into steps and waiting for data here: add the callback "
    "<code>Throughput()</code> to see both."
)


def _bar(name: str, split: Goodput) -> str:
    """Return a bar of the parts of a run's time, and the parts in words."""
    total = sum(split.seconds.values()) or 1.0
    parts = [(part, spent) for part, spent in split.seconds.items() if spent > 0]
    words = PARTS | ({} if split.divided else {"step": "training, undivided"})
    blocks = "".join(
        f'<i class="{part}" style="flex:{spent / total:.6f}" '
        f'title="{words[part]}: {duration(spent)}"></i>'
        for part, spent in parts
    )
    legend = "".join(
        f'<li><i class="{part}"></i>{words[part]} <b>{duration(spent)}</b> '
        f"{100 * spent / total:.1f} %</li>"
        for part, spent in parts
        if spent > LEAST_SHARE * total
    )
    label = f"{100 * split.share:.1f} %" if split.divided else f"{duration(split.running)}"
    says = "of the running time went into steps that count" if split.divided else "running time"
    if split.divided and split.seconds["down"] > 0:
        says += f"; {100 * split.share_of_clock:.1f} % counting the time between the sessions"
    heading = f"<h3>{escape(name)}</h3>" if name else ""
    return (
        f'{heading}<p class="goodput"><b>{label}</b> {says}</p><div class="bar">{blocks}</div>'
        f'<ul class="parts">{legend}</ul>'
    )


def _curves(charts: Sequence[Chart]) -> str:
    if not charts:
        return _card("Curves", '<p class="hint">Nothing was logged yet.</p>')
    places = [
        f'<figure class="chart" data-chart="{index}"></figure>' for index in range(len(charts))
    ]
    shown, rest = "".join(places[:MOST_CHARTS]), "".join(places[MOST_CHARTS:])
    more = f'<details><summary>More metrics</summary><div class="charts">{rest}</div></details>'
    tools = (
        '<p class="hint">Drag over a chart to look closer, double-click to see all. Click a name '
        'to hide its curve. <label><input type="range" id="smooth" min="0" max="0.98" step="0.02" '
        'value="0"> smoothing</label><span id="key"></span></p>'
        "<noscript>The curves are drawn by the script of this page.</noscript>"
    )
    section = f'{tools}<div class="charts">{shown}</div>{more if rest else ""}'
    return f'<section class="curves"><h2>Curves</h2>{section}</section>'


def _events(runs: Sequence[RunLog], splits: Sequence[Goodput | None]) -> str:
    parts = []
    for run, split in zip(runs, splits, strict=True):
        content = ""
        if split is not None and len(run.sessions) > 1:
            content += _table(_SESSIONS, sessions(run, split))
        if run.skips:
            content += _skips(run)
        if content:
            heading = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(heading + content)
    return _card("Resumes and skipped steps", "".join(parts)) if parts else ""


def _skips(run: RunLog) -> str:
    shown = ", ".join(f"{step:,}" for step in run.skips[:MOST_SKIPS])
    more = ", ..." if len(run.skips) > MOST_SKIPS else ""
    return (
        f"<p><b>{len(run.skips):,} windows were skipped</b>, after step {shown}{more}. Their "
        "gradients overflowed, or a callback asked for it.</p>"
    )


def _last_values(runs: Sequence[RunLog]) -> str:
    rows = [[name, *(_triple(cell) for cell in cells)] for name, cells in last_values(runs)]
    head = (
        ["metric", *(run.name for run in runs)]
        if len(runs) > 1
        else ["metric", "last, and lowest to highest"]
    )
    return _card("Last values", _table(head, rows, raw=True)) if rows else ""


def _triple(cell: tuple[str, str, str]) -> str:
    last, lowest, highest = cell
    return f"<b>{last}</b> <small>{lowest} to {highest}</small>" if last else ""


def _configuration(runs: Sequence[RunLog]) -> str:
    groups = configuration(runs)
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    if len(runs) == 1:
        content = "".join(_group(name, rows, head) for name, rows in groups.items())
        return _card("Configuration", f'<div class="groups">{content}</div>') if content else ""
    differing = [row for rows in groups.values() for row in rows if row.differs]
    equal = {name: [row for row in rows if not row.differs] for name, rows in groups.items()}
    same = "".join(_group(name, rows, []) for name, rows in equal.items() if rows)
    cells = [[row.name, *row.cells] for row in differing]
    found = _table(head, cells) if cells else '<p class="hint">None.</p>'
    return _card("Differences in configuration", found) + _card(
        "Equal in all runs", f'<div class="groups">{same}</div>' if same else ""
    )


def _group(name: str, rows: Sequence[Row], head: Sequence[str]) -> str:
    body = "".join(
        f"<tr{' class=default' if row.is_default else ''}><th>{_breakable(row.name)}</th>"
        f"<td>{_breakable(row.cells[0])}</td></tr>"
        for row in rows
    )
    return f"<div><h3>{escape(name)}</h3><table>{body}</table></div>"


def _notes(runs: Sequence[RunLog]) -> str:
    return "".join(
        f'<p class="hint">{escape(run.name)}: {run.unreadable} lines could not be read and are '
        "left out.</p>"
        for run in runs
        if run.unreadable
    )


def _breakable(text: str) -> str:
    """Return text as HTML whose long names may go on in the next line."""
    return re.sub(r"([_/])", r"\1<wbr>", escape(text))


def _card(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, raw: bool = False) -> str:
    """Return a table whose first column names the rows; `raw`: the other cells are HTML."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(first)}</th>"
        + "".join(f"<td>{cell if raw else escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead>{body}</table></div>'
