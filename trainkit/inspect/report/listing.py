"""What each run came to, to list and sort runs by."""

import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from os.path import getsize, isfile
from pathlib import Path
from socket import gethostname
from typing import Any

from trainkit.basics.hparams import flat
from trainkit.basics.run_files import MALFORMED, last_object, lines_from_end, object_at
from trainkit.inspect.report.goodput import goodput
from trainkit.inspect.report.records import Event, RunLog, Session, events_of, parse_line, read_run

_SHORT = 1 << 18  # bytes of a run of which all is read
_LAST_LINES = 100  # that are looked through for the last values
_CLOCK_STEPS = 10.0  # seconds by which the clock may have been set since a run began


def facts_of(path: Path) -> dict[str, Any]:
    """Return what the run with this file of metrics came to, as `facts` does.

    Of long files only the ends are read, from which the events lead to the rest; all of them where
    they do not, as an older version or a loop of one's own wrote them.

    Raises:
        ConfigError: Nothing in it can be read.
    """
    events = events_of(path)
    if sum(getsize(file) for file in (path, events) if isfile(file)) > _SHORT:
        with suppress(OSError, *MALFORMED):
            return _facts_of_ends(path, events)
    return facts(read_run(path))


def _facts_of_ends(path: Path, events: Path) -> dict[str, Any]:
    at, last = last_object(events)
    before = {**last["before"], last["kind"]: at}
    evaluation: dict[str, Any] = {"step": 0, "metrics": {}, "best": {}}
    if "evaluation" in before:
        evaluation = object_at(events, before["evaluation"], "evaluation")
    first, start = (object_at(events, each, "start") for each in (0, before["start"]))
    run = RunLog(name="", path=path)
    run.add_events([Event.of(each) for each in (first, start, last)])
    run.add_lines([{**evaluation["metrics"], "step": evaluation["step"]}, *_last_lines(path)])
    best = {
        name: {
            "value": float(value),
            "step": step,
            "higher_is_better": evaluation["higher_is_better"][name],
        }
        for name, (value, step) in evaluation["best"].items()
    }
    ran = float(start["ran"]) + run.sessions[-1].last.total
    chosen = evaluation.get("keep_best")
    return {**facts(run), "seconds": ran, "keep_best": chosen, "best": best}


def _last_lines(path: Path) -> list[dict[str, Any]]:
    last = []
    for _, line in islice(lines_from_end(path), _LAST_LINES):
        with suppress(*MALFORMED):
            last.append(parse_line(line))
    return [line for line in reversed(last) if line]


def facts(run: RunLog) -> dict[str, Any]:
    """Return what a run came to, as plain values by name.

    `state` is "finished", "stopped" (by something else than `max_epochs` or `max_steps`),
    "failed", "killed", "running", "running or killed" (on another machine), or "unknown" (without
    events). `ending` is the reason to stop or the class of the error. `started` and `heard`, the
    last sign of life, are in seconds since 1970; `seconds` is the running time of all sessions.
    """
    split, last = goodput(run), run.sessions[-1] if run.sessions else None
    return {
        "state": "unknown" if last is None else _state(last),
        "ending": last.ending if last is not None and last.is_complete else None,
        "started": run.sessions[0].time[0] if run.sessions else None,
        "heard": None if last is None else last.time[1],
        "seconds": None if split is None else split.running,
        **run.counters,
        "unreadable": run.unreadable,
        "keep_best": run.keep_best,
        "best": _best(run),
        "last": {name: points[-1][1] for name, points in run.curves.items()},
        "hparams": flat(run.hparams),
    }


def _best(run: RunLog) -> dict[str, dict[str, Any]]:
    """Return the best of each metric of which it is known what is better, its step, and that."""
    by_metric = {}
    for name, is_higher_better in {"eval/loss": False, **run.higher_is_better}.items():
        points = [point for point in run.curves.get(name, []) if not math.isnan(point[1])]
        if points:
            step, best = (max if is_higher_better else min)(points, key=lambda point: point[1])
            by_metric[name] = {"value": best, "step": step, "higher_is_better": is_higher_better}
    return by_metric


def _state(session: Session) -> str:
    if not session.is_complete:
        lives = _lives(session)
        return "running or killed" if lives is None else "running" if lives else "killed"
    error, reason = (session.last.values.get(name) for name in ("error", "reason"))
    if error or not reason:
        return "failed"
    return "finished" if reason in ("max_epochs", "max_steps") else "stopped"


def _lives(session: Session) -> bool | None:
    """Return whether the process of a session lives; None where that cannot be known here."""
    started = session.start.values.get("started")
    host, pid = (started.get(n) if isinstance(started, Mapping) else None for n in ("host", "pid"))
    if not isinstance(pid, int) or host != gethostname() or sys.platform != "linux":
        return None
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(rest[18]) / os.sysconf("SC_CLK_TCK")
    # A process that began after the session has only got its number.
    return state not in "ZX" and age + _CLOCK_STEPS > time.time() - session.time[0]
