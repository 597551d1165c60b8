"""Reads what a run has written: its metrics, and its life session by session.

However much that is, what is kept of it stays small: a file is read in stretches, and a curve keeps
the lowest and the highest point of each.
"""

import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from os.path import basename, isdir, isfile, lexists, realpath
from pathlib import Path
from typing import Any, TypeAlias

from trainkit.basics.run_files import LeftOut, json_object, stretches, whole_object
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.errors import ConfigError

METRICS = "metrics.jsonl"
_EVENTS = ".events.jsonl"
SECONDS = "time/seconds"
NOT_CURVES = {"step", "epoch", "samples", "kind", "skipped_steps", SECONDS}
STRETCHES = 2048  # that a file is read in
DRAWABLE = 1e100  # no axis reaches further
_MOST_SECONDS = 1e11  # of a clock: three thousand years
_MOST_COUNT = 2**53  # up to which all whole numbers are floats, too

Point: TypeAlias = tuple[int, float]
"""A step and a value."""


@dataclass(kw_only=True, slots=True)
class Event:
    """A line of the event log: something happened when the counters stood so."""

    kind: str
    step: int
    attempts: int  # windows, applied or skipped
    samples: int
    seconds: dict[str, float]  # of this session so far, by phase
    values: Mapping[str, Any]  # the whole line

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Event":
        """Return what a line says.

        Raises:
            Exception: One of `MALFORMED`: it is no event.
        """
        step, skipped = _count_in(entry, "step"), _count_in(entry, "skipped_steps")
        seconds = {phase: float(spent) for phase, spent in entry["seconds"].items()}
        if not (min(seconds.values(), default=0) >= 0 and sum(seconds.values()) < _MOST_SECONDS):
            raise ValueError("`seconds` are no times")
        return cls(
            kind=str(entry["kind"]),
            step=step,
            attempts=step + skipped,
            samples=_count_in(entry, "samples"),
            seconds=seconds,
            values=entry,
        )

    @property
    def total(self) -> float:
        """Seconds of the session so far."""
        return sum(self.seconds.values())

    @property
    def trained(self) -> float:
        """Seconds of training so far, waiting for data included."""
        return self.seconds.get("train", 0.0) + self.seconds.get("data_wait", 0.0)


class Session:
    """What one start of a run did, from its line "start" to its last sign of life.

    Args:
        start: The first line, which says what the run is made of.
    """

    def __init__(self, start: Event) -> None:
        self.start = self.last = start
        self.events = [start]
        """The first, the last, and those between that stand for the others."""
        self._logged = self._waited = 0.0  # seconds of training until the last log

    def add(self, event: Event, *, is_kept: bool) -> None:
        """Add a line, which is the last for now."""
        trained, share = event.seconds.get("train", 0.0), event.values.get("data_wait")
        if event.kind == "log":
            if isinstance(share, int | float):
                self._waited += min(1.0, max(0.0, share)) * (trained - self._logged)
            self._logged = trained
        if self._waited:  # which the clock counts as training
            event.seconds |= {"train": trained - self._waited, "data_wait": self._waited}
        self.last = event
        if is_kept:
            self.events.append(event)

    @property
    def time(self) -> tuple[float, float]:
        """When it began and was last heard of, in seconds since 1970."""
        begin = _within(_MOST_SECONDS, self.start.values.get("time")) - self.start.total
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


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run was by its metrics alone, at one of their lines."""

    step: int
    samples: float
    epoch: float
    seconds: float  # of running time


@dataclass(kw_only=True)
class RunLog:
    """All that is known of a run.

    Args:
        name: Tells the run from the others of a report.
    """

    name: str
    path: Path
    curves: dict[str, list[Point]] = field(default_factory=dict)
    """The curves by name, in the order in which they first appear; of long ones the ends of each
    stretch, and the last point."""
    progress: list[Progress] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    """Steps after which a window was skipped, or those that stand for all of them."""
    skipped: int = 0
    sessions: list[Session] = field(default_factory=list)
    """The starts of the run; empty where no events were written."""
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    """Whether higher values of a metric are the better ones, where the run has said it."""
    keep_best: str | None = None
    """The metric by which the run kept its best checkpoints."""
    unreadable: int = 0
    """Lines that are no entries, in both files."""
    _last: Mapping[str, Any] = field(default_factory=dict)  # line of metrics
    _ran: float = 0.0  # seconds, until the last line
    _clock: float = 0.0  # of the process that wrote it

    def add_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add a stretch of the metrics, whose lines have steps."""
        if not lines:
            return
        steps = [line["step"] for line in lines]
        for name in dict.fromkeys(chain.from_iterable(lines)):
            if name in NOT_CURVES:
                continue
            values: list[Any] = [line.get(name) for line in lines]
            at = steps
            if {*map(type, values)} != {float}:  # as nearly all are
                values = [as_number(value, None) for value in values]
                at = [step for step, value in zip(steps, values, strict=True) if value is not None]
                values = [value for value in values if value is not None]
            if values:
                curve = self.curves.setdefault(name, [])
                kept = _standing_for(values) | ({0} if not curve else set())
                curve += [(at[index], values[index]) for index in sorted(kept)]
        skips = [line["step"] for line in lines if line.get("kind") == "skip"]
        self.skips += skips if len(self.skips) < STRETCHES else skips[:1]
        self.skipped += len(skips)
        for line in () if self.sessions else lines:  # whose clocks are better
            now = _within(_MOST_SECONDS, line.get(SECONDS))
            self._ran += now if now < self._clock else now - self._clock  # else one began anew
            self._clock = now
        self._last = lines[-1]
        samples, epoch = (_within(_MOST_COUNT, self._last.get(n)) for n in ("samples", "epoch"))
        self.progress.append(Progress(self._last["step"], samples, epoch, self._ran))

    def add_events(self, events: Sequence[Event]) -> None:
        """Add a stretch of the events; what stands before the first start has no clock."""
        for number, event in enumerate(events, 1):
            if "higher_is_better" in event.values:
                higher = mapping(event.values["higher_is_better"])
                self.higher_is_better |= {name: value is True for name, value in higher.items()}
            if isinstance(chosen := event.values.get("keep_best"), str):
                self.keep_best = chosen
            if event.kind == "start":
                self.sessions.append(Session(event))
            elif self.sessions:
                is_last = number == len(events) or events[number].kind == "start"
                self.sessions[-1].add(event, is_kept=is_last)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of the run."""
        return not (self._last or self.sessions)

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
        if "hparams" in self.facts:
            return mapping(self.facts["hparams"])
        file = self.path.with_name(f"{self.path.stem}.hparams.json")
        return whole_object(file) if file.exists() else {}

    @property
    def counters(self) -> dict[str, int]:
        """Those of `step`, `epoch`, `samples` that are known, as they were last written."""
        source = self.sessions[-1].last.values if self.sessions else self._last
        values = {name: as_number(source.get(name), -1) for name in ("step", "epoch", "samples")}
        return {name: int(value) for name, value in values.items() if 0 <= value < _MOST_COUNT}


def _standing_for(values: list[float]) -> set[int]:
    """Return which of a stretch of a curve stand for all: its end, and what is odd."""
    if len(values) <= 3:
        return {*range(len(values))}
    kept = {len(values) - 1}
    if math.isfinite(sum(values)) and min(values) > -DRAWABLE and max(values) < DRAWABLE:
        return kept | {values.index(min(values)), values.index(max(values))}
    odd = [index for index, value in enumerate(values) if not abs(value) < DRAWABLE]
    for of_these in (range(len(values)), sorted({*range(len(values))} - {*odd})):
        finite = [index for index in of_these if math.isfinite(values[index])]
        kept |= {f(finite, key=values.__getitem__) for f in (min, max) if finite}
    return kept | {*odd[:1]}


def read_runs(paths: Iterable[Path]) -> list[RunLog]:
    """Read several runs, and call each by the shortest end of its path that no other has.

    A folder of runs stands for those in it, however deep. A run that has written nothing yet is
    empty; one without a log is left out, with a warning.
    """
    runs: list[RunLog] = []
    missing: list[ConfigError] = []
    to_read: list[Path] = []
    for path in paths:
        is_folder_of_runs = isdir(path) and not isfile(path / METRICS)
        within = find_runs(path) if is_folder_of_runs else ()
        logs = [each for each in within if each.name != CHECKPOINTS]
        to_read += sorted(logs, key=_counted) or [path]
    for log in to_read:
        try:
            runs.append(_read(log))
        except ConfigError as error:
            if not lexists(log):
                raise
            missing.append(error)
    if all(run.is_empty for run in runs):
        raise missing[0] if missing else ConfigError(_nothing(runs[0]))
    for why in missing:
        warnings.warn(f"Left out: {why}", LeftOut, stacklevel=2)
    files = [Path(realpath(run.path)) for run in runs]
    twice = [run.path for run, file in zip(runs, files, strict=True) if files.count(file) > 1]
    if twice:
        raise ConfigError(f"The run `{twice[0]}` was given twice. Name each run once.")
    folders = [file.parent if file.name == METRICS else file.with_suffix("") for file in files]
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

    A run may be under way: half a line at the end is left out. Lines that are no entries are named
    by a warning.
    """
    run = _read(path)
    if run.is_empty:
        raise ConfigError(_nothing(run))
    return run


def find_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder and below: files of metrics, or folders of checkpoints alone."""
    runs: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=_leave_out):
        logs = {METRICS, *(n.replace(_EVENTS, ".jsonl") for n in names if n.endswith(_EVENTS))}
        parts = sorted(logs.intersection(names)) or sorted({CHECKPOINTS}.intersection(folders))
        runs += [Path(parent, part) for part in parts]
        folders[:] = sorted({*folders} - {CHECKPOINTS})  # which hold no run
    return runs


def _leave_out(error: OSError) -> None:
    warnings.warn(f"`{error.filename}`: it was left out ({error.strerror}).", LeftOut, stacklevel=2)


def _counted(path: Path) -> list[Any]:
    """Return what sorts the tenth run after the ninth."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _nothing(run: RunLog) -> str:
    return (
        f"`{run.path}` holds no line that `JSONLLogger` wrote ({run.unreadable} lines in all). "
        "Wait for the first log of the run, or pass another run."
    )


def _read(path: Path) -> RunLog:
    file = path if isfile(path) else path / METRICS
    if not lexists(path):
        raise ConfigError(f"`{path}` does not exist. Pass the `output_dir` of a run.")
    if not isfile(file):
        raise ConfigError(
            f"`{path}` holds no `{METRICS}`, so there is nothing to report. Train with "
            '`callbacks=[..., JSONLLogger()]` and `Trainer(output_dir="...")`.'
        )
    run = RunLog(name=basename(realpath(path)), path=file)
    events = events_of(file)
    if lexists(events):
        for batch in stretches(events, lambda line: Event.of(json_object(line)), STRETCHES):
            run.unreadable += batch.count(None)
            run.add_events([event for event in batch if event is not None])
    for lines in stretches(file, parse_line, STRETCHES):
        run.unreadable += lines.count(None)
        run.add_lines([line for line in lines if line])
    return run


def events_of(metrics: Path) -> Path:
    """Return the file of the events that belong to a file of metrics."""
    return metrics.with_name(metrics.stem + _EVENTS)


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the entry of a line of metrics; an empty one where it belongs to no step.

    Raises:
        Exception: One of `MALFORMED`: it is none.
    """
    entry = json_object(line)
    if entry.get("step") is None:
        return {}
    _count_in(entry, "step")
    return entry


def _count_in(entry: Mapping[str, Any], name: str) -> int:
    value = entry[name]
    if type(value) is not int or not 0 <= value < _MOST_COUNT:
        raise ValueError(f"`{name}` is no count")
    return value


def _within(most: float, value: Any) -> float:
    """Return a number of [0, most), and 0 for what is none."""
    number: float = as_number(value)
    return number if 0 <= number < most else 0.0


def mapping(value: object) -> Mapping[str, Any]:
    """Return what is no mapping as an empty one."""
    return value if isinstance(value, Mapping) else {}


def as_number(value: Any, default: Any = 0.0) -> Any:
    """Return a number as it was logged, "NaN" and "Infinity" included; else the default."""
    if isinstance(value, float):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < DRAWABLE else math.inf if value > 0 else -math.inf
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return default
