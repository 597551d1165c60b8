"""The tables of a report: plain rows, which the page and the tests read."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainkit.basics.config import TrainConfig
from trainkit.basics.formatting import duration
from trainkit.basics.hparams import flat
from trainkit.inspect.report.goodput import Goodput
from trainkit.inspect.report.records import DRAWABLE, RunLog, mapping

_GROUPS = ("hparams", "config", "run", "optimizer", "versions", "started")
_PID = ("started", "pid")
_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}


@dataclass(frozen=True, slots=True)
class Row:
    """A setting, and its value in each run.

    Attributes:
        values: Numbers, and all else as text; None where a run does not have it.
        is_default: Whether all values are what trainkit takes unless told otherwise.
    """

    name: str
    values: Sequence[float | str | None]
    is_default: bool = False

    @property
    def cells(self) -> list[str]:
        """The values as text."""
        return [_cell(self.name, value) for value in self.values]

    @property
    def differs(self) -> bool:
        """Whether the values are not all alike."""
        return len(set(self.values)) > 1


def number(value: float) -> str:
    """Return a value with four digits, whole numbers with all of theirs."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def configuration(runs: Sequence[RunLog]) -> dict[str, list[Row]]:
    """Return the settings of the runs in groups; names inside of others are joined by dots."""
    return {
        group: [
            Row(
                name,
                [_plain(part, name) for part in parts],
                group == "config" and all(p.get(name) == _DEFAULTS.get(name) for p in parts),
            )
            for name in dict.fromkeys(name for part in parts for name in part)
            if (group, name) != _PID or len(runs) == 1  # no two runs could agree on it
        ]
        for group in _GROUPS
        if any(parts := [flat(_facts(run, group)) for run in runs])
    }


def _facts(run: RunLog, group: str) -> Mapping[str, Any]:
    return run.hparams if group == "hparams" else mapping(run.facts.get(group))


def _plain(values: Mapping[str, Any], name: str) -> float | str | None:
    if name not in values:
        return None
    value = values[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and abs(value) < DRAWABLE:
        return value
    return "none" if value is None else str(value)


def _cell(name: str, value: float | str | None) -> str:
    if isinstance(value, float) and value != int(value):
        return f"{value:.6g}"
    return number(value) if isinstance(value, int | float) and name != "pid" else str(value or "")


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
