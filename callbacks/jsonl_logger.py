"""Write the metrics of a run as lines of JSON, and what loggers share that write lines."""

import json
import math
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.console import lost
from trainkit.basics.formatting import json_value
from trainkit.basics.outputs import absolute
from trainkit.basics.run_files import MALFORMED, drop_half_line, last_object, object_at
from trainkit.basics.written_files import Lines, check_file, claim
from trainkit.callbacks._support.log_paths import log_place, move_away
from trainkit.callbacks._support.run_facts import run_facts
from trainkit.callbacks.logger import Logger
from trainkit.trackers.files import FileTracker, JSONLTracker
from trainkit.training.run import Run
from trainkit.training.run_parts import TrainState
from trainkit.types import Scalars, StepResult

__all__ = ["FileLogger", "JSONLLogger"]

DATA_WAIT = "time/data_wait"  # as `Throughput` logs it: a share of the seconds of training
_LED_TO = ("start", "evaluation")  # lines to which all others lead
RESERVED = ("step", "epoch", "samples", "kind", "time/seconds")


class FileLogger(Logger):
    """Writes where the run is and what it logged, as a line; see `JSONLLogger`."""

    _kind: type[FileTracker]
    _in_dry_run = True

    @checked
    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else absolute(path, "path")

    @override
    def check_output(self, run: Run) -> None:
        files = self._files(self._log_path(run))
        for each in files if run.is_main_process else ():
            claim(run.internals.outputs, each, f"`{self.name}`")
            check_file(each, f"`{self.name}`")

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self._write(run, "skip", {"skipped_steps": run.state.skipped_steps})

    @override
    def _make_tracker(self, run: Run) -> FileTracker:
        path = self._log_path(run)
        tracker = self._kind("", path.parent, path.name)
        tracker.owner = f"`{self.name}`"
        if run.state.attempts == 0:
            move_away(*self._files(path))
        elif path.is_file() and not tracker.cut(partial(_is_up_to, run.state)):
            warnings.warn(
                f"`{path}` holds no line that `{self.name}` wrote. It was moved away, and the run "
                "goes on in a new file.",
                stacklevel=2,
            )
            move_away(path)
        return tracker

    @override
    def _write(self, run: Run, kind: str, values: Mapping[str, float]) -> None:
        state = run.state
        progress = {"epoch": state.epoch, "samples": state.samples_seen, "kind": kind}
        if self._tracker is not None:
            named = {f"log/{n}" if n in RESERVED else n: value for n, value in values.items()}
            self._tracker.log(progress | named, step=state.step)

    def _files(self, path: Path) -> tuple[Path, ...]:
        """Return all that is written."""
        return (path, path.with_name(f"{path.stem}.hparams.json"))

    def _log_path(self, run: Run) -> Path:
        name = f"metrics.{self._kind.name}"
        return log_place(run, self.path, name, owner=type(self).__name__, argument="path")


class JSONLLogger(FileLogger):
    """Writes one JSON object a line: where the run is, then the values.

    Each line has `step` (updates applied), `epoch` (completed), `samples` (consumed since the
    start, all processes), `kind` and `time/seconds` (since this process began to train). `kind`
    is "train" for logged values, "eval" for evaluations under their own names, and "skip" for a
    window without an update, with `skipped_steps`. A logged value that is itself called like one
    of these stands as `log/<name>`.

    The lines are strict JSON: a value that is not finite is the text "NaN", "Infinity" or
    "-Infinity", which `float` reads. Each line is on its way to the disk once written, so a
    killed run loses none; what a full disk does not take is written later. A resumed run first
    cuts what was written after its step. A new run moves the file of an older one to `<name>.1`,
    or the next number that is free. Only the main process writes.

    Beside it, `metrics.events.jsonl` says when the run started, logged, evaluated, saved and ended,
    with the seconds by phase; its lines "start" hold the hyperparameters, configuration, versions
    and command. It is never cut, so that `trainkit report` can tell what was trained twice.

    Args:
        path: The file; by default `<output_dir>/metrics.jsonl`.
    """

    _kind = JSONLTracker
    _events: "EventLog | None" = None
    _error: str | None = None

    @override
    def on_fit_start(self, run: Run) -> None:
        super().on_fit_start(run)
        if run.is_main_process:
            self._error = None
            self._events = EventLog(events_path(self._log_path(run)), run)

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        super().on_log(run, values)
        waits = {"data_wait": values[DATA_WAIT]} if DATA_WAIT in values else {}
        self._note("log", **waits)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        super().on_evaluation_end(run, metrics)
        if self._events is not None:
            self._events.evaluated(metrics)

    @override
    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self._note("checkpoint", name=path.name)

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._error = type(error).__name__

    @override
    def on_fit_end(self, run: Run) -> None:
        self._note("end", reason=run.stop_reason, error=self._error, lost=lost())
        if self._events is not None:
            self._events.close()
            self._events = None
        super().on_fit_end(run)

    @override
    def _settings(self, run: Run) -> Mapping[str, Any]:
        return {}  # they are among the events

    @override
    def _files(self, path: Path) -> tuple[Path, ...]:
        return (path, events_path(path))

    def _note(self, kind: str, **values: Any) -> None:
        if self._events is not None:
            self._events.write(kind, **values)


def _is_up_to(state: TrainState, entry: Mapping[str, Any]) -> bool:
    """Return whether an entry was written until `state`; its values may be texts."""
    # A skipped window moves on in the data but not in the steps.
    seen = int(entry["step"]) <= state.step and int(entry["samples"]) <= state.samples_seen
    skips = int(entry["skipped_steps"]) if entry["kind"] == "skip" else 0
    return seen and skips <= state.skipped_steps


def events_path(metrics: Path) -> Path:
    """Return the file of the events that belong to a file of metrics."""
    return metrics.with_name(f"{metrics.stem}.events.jsonl")


class EventLog:
    """Appends what happens to a run, with the seconds that each phase has taken by then.

    Each line has `kind`, the counters, and `seconds`: those of this fit by phase. The line "start"
    has besides `time` (seconds since 1970), the seconds that earlier fits `ran`, and what the run
    is made of; the line "evaluation" the metrics, and the best until then with their steps. A
    resumed run adds to the file, so that it tells what was done twice; that of the metrics is cut.

    In each line `before` says at which bytes the latest "start" and "evaluation" before it are, so
    that from the end of a file of any length all is found that `trainkit runs ls` shows.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self._run = run
        self._before: dict[str, int] | None = {}  # None: an older version began the file
        self._best: dict[str, tuple[float, int]] = {}
        ran: float | None = 0.0
        if path.is_file():
            drop_half_line(path)
            try:
                ran = self._go_on(path) if path.stat().st_size else 0.0
            except (OSError, *MALFORMED):
                self._before = ran = None
        self._file = Lines(path, "`JSONLLogger`")
        came_from = run.checkpoints.resumed_from
        facts = {"hparams": run.hparams, **run_facts(run)}
        self.write("start", time=time.time(), ran=ran, resumed_from=came_from, **facts)

    def _go_on(self, path: Path) -> float:
        """Take over what led to the step of the run; return the seconds that earlier fits ran."""
        at, last = last_object(path)
        before = {**last["before"], last["kind"]: at}
        start, evaluated = before["start"], before.get("evaluation")
        while evaluated is not None:
            line = object_at(path, evaluated, "evaluation")
            if line["step"] <= self._run.state.step:
                best = line["best"].items()
                self._best = {name: (float(value), step) for name, (value, step) in best}
                break
            earlier = line["before"].get("evaluation")
            evaluated = None if earlier is None else min(earlier, evaluated - 1)
        self._before = {"start": start} | ({} if evaluated is None else {"evaluation": evaluated})
        return float(object_at(path, start, "start")["ran"] + sum(last["seconds"].values()))

    def write(self, kind: str, **values: Any) -> None:
        """Add a line."""
        run, state = self._run, self._run.state
        entry = {
            "kind": kind,
            "step": state.step,
            "epoch": state.epoch,
            "samples": state.samples_seen,
            "skipped_steps": state.skipped_steps,
            "seconds": {phase: round(spent, 4) for phase, spent in run.clock.seconds().items()},
            "before": self._before,
        }
        if self._before is not None and kind in _LED_TO:
            self._before = self._before | {kind: self._file.size()}
        self._file.write(json.dumps(json_value(entry | values), allow_nan=False))

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Add the line of an evaluation; of NaN nothing is the best."""
        evaluation = self._run.evaluation
        higher_is_better, chosen = evaluation.ends(), evaluation.keep_best
        for name, is_higher in higher_is_better.items():
            if math.isnan(value := metrics.get(name, math.nan)):
                continue
            best, _ = self._best.setdefault(name, (value, self._run.state.step))
            if value > best if is_higher else value < best:
                self._best[name] = value, self._run.state.step
        known = {"metrics": metrics, "best": self._best, "higher_is_better": higher_is_better}
        self.write("evaluation", **known, **({} if chosen is None else {"keep_best": chosen[0]}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
