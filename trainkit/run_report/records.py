"""Reads what a run has written: its metrics, and its life session by session."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from trainkit.errors import ConfigError

__all__ = ["Event", "Point", "RunLog", "Session", "as_number", "read_run", "read_runs"]

METRICS = "metrics.jsonl"
SECONDS = "time/seconds"
NOT_CURVES = {"step", "epoch", "samples", "kind", "skipped_steps", SECONDS}

Point: TypeAlias = tuple[int, float]
"""A step and a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A line of the event log: something happened when the counters stood so."""

    kind: str
    step: int
    attempts: int  # windows, applied or skipped
    samples: int
    seconds: Mapping[str, float]  # of this session so far, by phase
    values: Mapping[str, Any]  # the whole line

    @property
    def total(self) -> float:
        """Seconds of the session so far."""
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True)
class Session:
    """What one start of a run did, from its line "start" to its last sign of life."""

    events: Sequence[Event]

    @property
    def start(self) -> Event:
        """The first line, which says what the run is made of."""
        return self.events[0]

    @property
    def last(self) -> Event:
        """The last sign of life."""
        return self.events[-1]

    @property
    def time(self) -> tuple[float, float]:
        """When it began and was last heard of, in seconds since 1970."""
        begin = as_number(self.start.values.get("time")) - self.start.total
        return begin, begin + self.last.total

    @property
    def is_complete(self) -> bool:
        """Whether it said that it ended."""
        return self.last.kind == "end"

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if not self.is_complete:
            return "under way or killed"
        error = self.last.values.get("error")
        return str(error or self.last.values.get("reason") or "an error before the first step")


@dataclass(kw_only=True)
class RunLog:
    """All that is known of a run.

    Args:
        name: Tells the run from the others of a report.
        path: The file of metrics.
        lines: Its lines as they are.
        sessions: The starts of the run; empty where no events were written.
        unreadable: Lines that are no entries, in both files.
    """

    name: str
    path: Path
    lines: Sequence[Mapping[str, Any]]
    sessions: Sequence[Session] = field(default_factory=list)
    unreadable: int = 0

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """The curves by name, in the order in which they first appear."""
        found: dict[str, list[Point]] = {}
        for line in self.lines:
            for name, value in line.items():
                if name not in NOT_CURVES and (number := as_number(value, None)) is not None:
                    found.setdefault(name, []).append((line["step"], number))
        return found

    @cached_property
    def skips(self) -> list[int]:
        """Steps after which a window was skipped."""
        return [line["step"] for line in self.lines if line.get("kind") == "skip"]

    @property
    def resumes(self) -> list[int]:
        """Steps from which the run was resumed."""
        return [session.start.step for session in self.sessions[1:]]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the run was made of when it was last started; empty where nobody wrote it."""
        return self.sessions[-1].start.values if self.sessions else {}

    @cached_property
    def hparams(self) -> Mapping[str, Any]:
        """The hyperparameters; those of a loop of one's own stand in a file beside the metrics."""
        said = self.facts.get("hparams")
        if said is None:
            file = self.path.with_name(f"{self.path.stem}.hparams.json")
            try:
                said = json.loads(file.read_bytes())
            except (OSError, ValueError):
                said = None
        return said if isinstance(said, Mapping) else {}

    @cached_property
    def higher_is_better(self) -> dict[str, bool]:
        """Whether higher values of a metric are the better ones, where the run has said it."""
        known: dict[str, bool] = {}
        for session in self.sessions:
            for event in session.events:
                said = event.values.get("higher_is_better")
                known |= said if isinstance(said, Mapping) else {}
        return known

    @property
    def counters(self) -> dict[str, int]:
        """Those of `step`, `epoch`, `samples` that are known, as they were last written."""
        ends = [self.sessions[-1].last.values] if self.sessions else []
        source = [*self.lines[-1:], *ends][-1] if self.lines or ends else {}
        names = [name for name in ("step", "epoch", "samples") if name in source]
        return {name: int(as_number(source[name])) for name in names}


def read_runs(paths: Iterable[Path]) -> list[RunLog]:
    """Read several runs, and call each by the shortest end of its path that no other has.

    A folder of runs stands for those in it, up to two levels deep. A run that has written nothing
    yet is empty.

    Raises:
        ConfigError: One of them has no log, none has a line, or one was named twice.
    """
    runs = [_read(run) for path in paths for run in _places(path)]
    if not any(run.lines or run.sessions for run in runs):
        raise ConfigError(_nothing(runs[0]))
    places = [run.path.resolve() for run in runs]
    twice = [run.path for run, place in zip(runs, places, strict=True) if places.count(place) > 1]
    if twice:
        raise ConfigError(f"The run `{twice[0]}` was given twice. Name each run once.")
    folders = [p.parent if p.name == METRICS else p.with_suffix("") for p in places]
    for run, folder in zip(runs, folders, strict=True):
        run.name = _short_name(folder, folders)
    return runs


def _short_name(folder: Path, folders: Sequence[Path]) -> str:
    for length in range(1, len(folder.parts) + 1):
        end = folder.parts[-length:]
        if sum(other.parts[-length:] == end for other in folders) == 1:
            return "/".join(end)
    return str(folder)


def read_run(path: Path) -> RunLog:
    """Read a run's directory, or the file that a `JSONLLogger` wrote.

    A run may be under way: half a line at the end is left out.

    Raises:
        ConfigError: There is no log, or nothing in it can be read.
    """
    run = _read(path)
    if not (run.lines or run.sessions):
        raise ConfigError(_nothing(run))
    return run


def _places(path: Path) -> list[Path]:
    """Return the runs that a path stands for: itself, or those below it."""
    if (path / METRICS).is_file():
        return [path]
    below = [*path.glob(f"*/{METRICS}"), *path.glob(f"*/*/{METRICS}")]
    return sorted((found.parent for found in below), key=_counted) or [path]


def _counted(path: Path) -> list[Any]:
    """Return what sorts the tenth run after the ninth."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _nothing(run: RunLog) -> str:
    return (
        f"`{run.path}` holds no line that `JSONLLogger` wrote ({run.unreadable} lines in all). "
        "Wait for the first log of the run, or pass another run."
    )


def _read(path: Path) -> RunLog:
    file = path if path.is_file() else path / METRICS
    if not file.is_file():
        raise ConfigError(_no_log(path))
    lines = [entry for entry in _entries(file) if entry is None or entry.get("step") is not None]
    events = file.with_name(f"{file.stem}.events.jsonl")
    written = list(_entries(events)) if events.is_file() else []
    good = [line for line in lines if line is not None and isinstance(line["step"], int)]
    known = [event for entry in written if entry and (event := _event(entry)) is not None]
    bad = len(lines) - len(good) + len(written) - len(known)
    name = path.resolve().name
    return RunLog(name=name, path=file, lines=good, sessions=_sessions(known), unreadable=bad)


def _no_log(path: Path) -> str:
    if not path.exists():
        return f"`{path}` does not exist. Pass the `output_dir` of a run."
    return (
        f"`{path}` holds no `{METRICS}`, so there is nothing to report. Train with "
        '`callbacks=[..., JSONLLogger()]` and `Trainer(output_dir="...")`.'
    )


def _entries(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the objects of the lines; None for a line that holds none, but for half a last one."""
    for line in file.read_bytes().split(b"\n")[:-1]:
        try:
            entry = json.loads(line) if line.strip() else {}
        except ValueError:
            entry = None
        if entry != {}:
            yield entry if isinstance(entry, dict) else None


def _event(entry: Mapping[str, Any]) -> Event | None:
    try:
        return Event(
            kind=str(entry["kind"]),
            step=int(entry["step"]),
            attempts=int(entry["step"]) + int(entry["skipped_steps"]),
            samples=int(entry["samples"]),
            seconds={str(phase): float(spent) for phase, spent in entry["seconds"].items()},
            values=entry,
        )
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _sessions(events: Sequence[Event]) -> list[Session]:
    """Cut the events at each "start"; what stands before the first has no clock and is left out."""
    starts = [index for index, event in enumerate(events) if event.kind == "start"]
    ends = [*starts, len(events)][1:]
    return [Session(events[start:end]) for start, end in zip(starts, ends, strict=True)]


def as_number(value: Any, default: Any = 0.0) -> Any:
    """Return a number as it was logged, "NaN" and "Infinity" included; else the default."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return math.nan if value == "NaN" else float(value)
    return default
