"""Write the metrics of a run as lines of JSON."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.callbacks._support.event_log import EventLog, events_path
from trainkit.callbacks._support.log_paths import log_place
from trainkit.config import checked
from trainkit.console import lost
from trainkit.errors import ConfigError
from trainkit.formatting import json_value
from trainkit.outputs import Lines, absolute, check_file, replace_file
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.training.state import TrainState
from trainkit.types import Scalars, StepResult

__all__ = ["JSONLLogger"]

SECONDS = "time/seconds"
DATA_WAIT = "time/data_wait"  # as `Throughput` logs it: a share of the seconds of training
RESERVED = ("step", "epoch", "samples", "kind", SECONDS)


class JSONLLogger(Callback):
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

    Beside it, `metrics.events.jsonl` says when the run started, logged, evaluated, saved and
    ended, with the seconds by phase; its lines "start" hold the configuration, versions and
    command. It is never cut, so that `trainkit report` can tell what was trained twice.

    Args:
        path: The file; by default `<output_dir>/metrics.jsonl`.
    """

    @checked
    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else absolute(path, "path")
        self._file: Lines | None = None
        self._events: EventLog | None = None
        self._error: str | None = None
        self._start = 0.0

    @override
    def check_output(self, run: Run) -> None:
        path = self._log_path(run)
        if run.is_main_process:
            for each in (path, events_path(path)):
                check_file(each, f"`{self.name}`")

    @override
    def on_fit_start(self, run: Run) -> None:
        path = self._log_path(run)
        if not run.is_main_process:
            return
        self._start = time.monotonic()
        if path.exists() and run.state.attempts > 0:
            _cut(path, run.state)
        elif any(each.exists() and each.stat().st_size > 0 for each in (path, events_path(path))):
            _move_away(path, events_path(path))
        self._file = Lines(path, f"`{self.name}`")
        self._error = None
        self._events = EventLog(events_path(path), run)

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self._write(run, "skip", {"skipped_steps": run.state.skipped_steps})

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        self._write(run, "train", values)
        if self._events is not None:
            waits = {"data_wait": values[DATA_WAIT]} if DATA_WAIT in values else {}
            self._events.write("log", **waits)

    @override
    def on_late_log(self, run: Run, values: Scalars) -> None:
        self.on_log(run, values)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self._write(run, "eval", metrics)
        if self._events is not None:
            self._events.write("evaluation")

    @override
    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        if self._events is not None:
            self._events.write("checkpoint", name=path.name)

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._error = type(error).__name__

    @override
    def on_fit_end(self, run: Run) -> None:
        if self._events is not None:
            self._events.write("end", reason=run.stop_reason, error=self._error, lost=lost())
            self._events.close()
            self._events = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, run: Run, kind: str, values: Mapping[str, float]) -> None:
        if self._file is None:
            return
        state = run.state
        entry: dict[str, Any] = {
            "step": state.step,
            "epoch": state.epoch,
            "samples": state.samples_seen,
            "kind": kind,
        }
        for name, value in values.items():
            entry[f"log/{name}" if name in RESERVED else name] = value
        entry[SECONDS] = round(time.monotonic() - self._start, 3)
        self._file.write(json.dumps(json_value(entry), allow_nan=False))

    def _log_path(self, run: Run) -> Path:
        return log_place(run, self.path, "metrics.jsonl", owner="JSONLLogger", argument="path")


def _move_away(*paths: Path) -> None:
    """Rename the files of an older run, all by the same number."""
    number = 1
    while any(path.with_name(f"{path.name}.{number}").exists() for path in paths):
        number += 1
    for path in paths:
        if path.exists():
            path.rename(path.with_name(f"{path.name}.{number}"))


def _cut(path: Path, state: TrainState) -> None:
    """Keep only what was written up to `state`; a half line at the end goes in any case."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # the process was killed while it wrote
    kept = [
        line
        for number, line in enumerate(lines, 1)
        if _is_up_to(line, state, f"{path}, line {number}")
    ]
    replace_file(path, b"".join(kept))


def _is_up_to(line: bytes, state: TrainState, place: str) -> bool:
    try:
        entry = json.loads(line)
        written, skips = entry["step"], entry.get("skipped_steps", 0)
        samples = entry["samples"]
        is_skip = entry["kind"] == "skip"
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{place}: this is no line of `JSONLLogger`, so the file was left as it is. Pass "
            "another `path`, or move the file away."
        ) from None
    # A skipped window moves on in the data but not in the steps.
    seen = written <= state.step and samples <= state.samples_seen
    return bool(seen and not (is_skip and skips > state.skipped_steps))
