"""The tables of a report: plain rows, which the page and the tests read."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainkit.config import TrainConfig
from trainkit.formatting import duration
from trainkit.run_report.goodput import Goodput
from trainkit.run_report.records import RunLog

__all__ = ["Row", "configuration", "last_values", "number", "sessions", "summary"]

MOST_VALUES = 4  # of the evaluation, in the summary
_GROUPS = ("config", "run", "optimizer", "versions", "started")
_COUNTERS = {"step": "steps", "epoch": "epochs", "samples": "samples"}
_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}


@dataclass(frozen=True, slots=True)
class Row:
    """A name and a cell for each run.

    Attributes:
        differs: Whether the cells are not all alike.
        is_default: Whether all cells are what trainkit takes unless told otherwise.
    """

    name: str
    cells: Sequence[str]
    is_default: bool = False

    @property
    def differs(self) -> bool:
        """Whether the cells are not all alike."""
        return len(set(self.cells)) > 1


def number(value: float) -> str:
    """Return a value with four digits, whole numbers with all of theirs."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def summary(run: RunLog, split: Goodput | None) -> list[tuple[str, str]]:
    """Return what a run came to, in a few names and values; its evaluation first."""
    rows = [
        (name, number(points[-1][1]))
        for name, points in run.curves.items()
        if name.startswith("eval/")
    ][:MOST_VALUES]
    rows += [(_COUNTERS[name], number(value)) for name, value in run.counters.items()]
    if split is not None:
        rows += [
            ("ended by", run.sessions[-1].ending),
            ("running time", duration(split.running)),
            ("goodput", f"{100 * split.share:.1f} %" if split.divided else "not known"),
            ("resumes", number(len(run.resumes))),
        ]
    return [*rows, ("skipped steps", number(len(run.skips)))]


def last_values(runs: Sequence[RunLog]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return for each metric and run its last, lowest and highest value; times are left out."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    order = sorted(names, key=lambda name: not name.startswith("eval/"))
    return [
        (name, [_extremes([value for _, value in run.curves.get(name, [])]) for run in runs])
        for name in order
        if not name.startswith("time/")
    ]


def _extremes(values: Sequence[float]) -> tuple[str, str, str]:
    if not values:
        return "", "", ""
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    return number(values[-1]), number(min(finite)), number(max(finite))


def configuration(runs: Sequence[RunLog]) -> dict[str, list[Row]]:
    """Return the settings of the runs in groups, with a cell for each run."""
    return {
        group: [
            Row(name, [_cell(part, name) for part in parts], _is_default(group, name, parts))
            for name in dict.fromkeys(name for part in parts for name in part)
        ]
        for group in _GROUPS
        if any(parts := [_mapping(run.facts.get(group)) for run in runs])
    }


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _cell(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return ""
    value = values[name]
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) and name != "pid" else str(value)


def _is_default(group: str, name: str, parts: Iterable[Mapping[str, Any]]) -> bool:
    return group == "config" and all(part.get(name) == _DEFAULTS.get(name) for part in parts)


def sessions(run: RunLog, split: Goodput) -> list[list[str]]:
    """Return a row for each start of a run: when, from where to where, and what was lost."""
    rows: list[list[str]] = []
    for session, lost, down in zip(run.sessions, split.lost, split.down, strict=True):
        begin, _ = session.time
        rows.append(
            [
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin)),
                number(session.start.step),
                number(session.last.step),
                duration(session.last.total),
                session.ending if session is run.sessions[-1] or session.is_complete else "killed",
                f"{number(lost.windows)} ({duration(lost.seconds)})" if lost.windows else "none",
                duration(down) if down else "",
            ]
        )
    return rows
