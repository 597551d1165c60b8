"""The page of a report: one HTML file that needs nothing else, from disk or from a server."""

import json
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from trainkit.basics.formatting import duration
from trainkit.inspect.report.curves import MOST_CHARTS, MOST_POINTS, Chart, Series, charts_of
from trainkit.inspect.report.goodput import PARTS, Goodput, goodput, together
from trainkit.inspect.report.records import RunLog
from trainkit.inspect.report.sweep import axes, metrics, varied
from trainkit.inspect.report.tables import Row, configuration, sessions

MOST_SKIPS = 60  # that are listed by step
LEAST_SHARE = 0.0005  # of the time that is told in words
FEW_RUNS = 6  # that are shown beside each other; more are shown below each other
ALL_KNOTS = 20_000  # of the axes of all runs
_SESSIONS = "started", "from step", "until step", "ran", "ended by", "done again", "down before"


def make_page(runs: Sequence[RunLog]) -> str:
    """Return the page for some runs as text."""
    splits = [goodput(run) for run in runs]
    charts = charts_of(runs)
    is_few = len(runs) <= FEW_RUNS
    title = ", ".join(run.name for run in runs) if is_few else f"{len(runs)} runs"
    body = [
        _header(runs),
        '<dl id="tiles"></dl>' if len(runs) == 1 else _card("Runs", '<div id="runs"></div>'),
        "" if is_few else _card("Parameters", '<div id="parameters"></div>'),
        _goodput(runs, splits),
        _curves(charts, several=len(runs) > 1),
        _events(runs, splits),
        _card("Last values", '<div id="values"></div>'),
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
            f'</main><script type="application/json" id="data">{_data(runs, splits, charts)}',
            f"</script><script>{_asset('page.js')}{_asset('sweep.js')}</script></body></html>\n",
        ]
    )


def _asset(name: str) -> str:
    return (files("trainkit.inspect.report") / name).read_text(encoding="utf-8")


def _data(runs: Sequence[RunLog], splits: Sequence[Goodput | None], charts: Sequence[Chart]) -> str:
    """Return the curves and the table of runs as JSON that cannot end its element."""
    most = max(20, min(MOST_POINTS, ALL_KNOTS // len(runs)))
    data = {
        "runs": [
            {
                **{"name": run.name, "resumes": run.resumes},
                **{"skips": run.skips, "skipped": run.skipped},
                **{"axes": axes(run, most), "counters": run.counters},
                "seconds": split and split.running,
                "goodput": split.share if split and split.divided else None,
                "ended": run.sessions[-1].ending if run.sessions else None,
            }
            for run, split in zip(runs, splits, strict=True)
        ],
        "charts": charts,
        "metrics": metrics(runs),
        "varied": [{"name": row.name, "values": row.values} for row in varied(runs)],
    }

    def fields(part: Chart | Series) -> dict[str, Any]:
        return {name: getattr(part, name) for name in part.__slots__}

    text = json.dumps(data, default=fields, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _header(runs: Sequence[RunLog]) -> str:
    heading = escape(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"
    made = time.strftime("%Y-%m-%d %H:%M")
    return (
        f'<header><div><p class="kicker">trainkit report, {made}</p><h1>{heading}</h1></div>'
        f'<button id="theme" title="light or dark">light / dark</button></header>'
    )


def _goodput(runs: Sequence[RunLog], splits: Sequence[Goodput | None]) -> str:
    names = [run.name if len(runs) > 1 else "" for run in runs]
    known = [(name, split) for name, split in zip(names, splits, strict=True) if split is not None]
    if len(known) > FEW_RUNS:
        known = [(f"{len(known)} runs together", together([split for _, split in known]))]
    if not known:
        return _card("Where the time went", f'<p class="hint">{_NO_EVENTS}</p>')
    undivided = any(not split.divided for _, split in known)
    hint = f'<p class="hint">{_UNDIVIDED}</p>' if undivided else ""
    bars = "".join(_bar(name, split) for name, split in known)
    return _card("Where the time went", bars + hint)


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
    total = split.running or 1.0
    parts = [(part, spent) for part, spent in split.parts.items() if spent > 0]
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
    label = f"{100 * split.share:.1f} %" if split.divided else duration(split.running)
    says = "running time"
    if split.divided:
        says = f"of {duration(split.running)} running time went into steps that count"
    if (down := split.seconds["down"]) > 0:
        says += f"; {duration(down)} more lay between the sessions"
    heading = f"<h3>{escape(name)}</h3>" if name else ""
    return (
        f'{heading}<p class="goodput"><b>{label}</b> {says}</p><div class="bar">{blocks}</div>'
        f'<ul class="parts">{legend}</ul>'
    )


def _curves(charts: Sequence[Chart], *, several: bool) -> str:
    if not charts:
        return _card("Curves", '<p class="hint">Nothing was logged yet.</p>')
    figures = [
        f'<figure class="chart" data-chart="{index}"></figure>' for index in range(len(charts))
    ]
    shown, rest = "".join(figures[:MOST_CHARTS]), "".join(figures[MOST_CHARTS:])
    more = f'<details><summary>More metrics</summary><div class="charts">{rest}</div></details>'
    tools = (
        f'<p class="hint">Drag over a chart to look closer, double-click to see all. Click a '
        f"{'curve to highlight its run' if several else 'name to hide its curve'}. "
        '<span id="key"></span></p><div id="tools" class="tools"></div>'
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
    told = f'<div class="tall">{"".join(parts)}</div>' if parts else ""
    return _card("Resumes and skipped steps", told)


def _skips(run: RunLog) -> str:
    shown = ", ".join(f"{step:,}" for step in run.skips[:MOST_SKIPS])
    more = ", ..." if run.skipped > MOST_SKIPS else ""
    return (
        f"<p><b>{run.skipped:,} windows were skipped</b>, after step {shown}{more}. Their "
        "gradients overflowed, or a callback asked for it.</p>"
    )


def _configuration(runs: Sequence[RunLog]) -> str:
    groups = configuration(runs)
    if len(runs) == 1:
        content = "".join(_group(name, rows) for name, rows in groups.items())
        return _card("Configuration", f'<div class="groups">{content}</div>') if content else ""
    differing = [row for rows in groups.values() for row in rows if row.differs]
    equal = {name: [row for row in rows if not row.differs] for name, rows in groups.items()}
    same = "".join(_group(name, rows) for name, rows in equal.items() if rows)
    cells = [[row.name, *row.cells] for row in differing]
    table = _compared(runs, cells) or '<p class="hint">None.</p>'
    return _card("Differences in configuration", table) + _card(
        "Equal in all runs", f'<div class="groups">{same}</div>' if same else ""
    )


def _group(name: str, rows: Sequence[Row]) -> str:
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


def _compared(runs: Sequence[RunLog], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a column for each run, and where they are many with a row for each."""
    table: list[Sequence[str]] = [["run", *(run.name for run in runs)], *rows]
    if len(runs) > FEW_RUNS:
        table = list(zip(*table, strict=True))
    return _table(table[0], table[1:]) if rows else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column names the rows."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{escape(first)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="wide tall"><table><thead><tr>{top}</tr></thead>{body}</table></div>'
