"""Write the metrics of a run as lines of JSON."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics.console import lost
from trainkit.callbacks._support.file_logger import EventLog, FileLogger, events_path
from trainkit.trackers.files import JSONLTracker
from trainkit.training.run import Run
from trainkit.types import Scalars

__all__ = ["JSONLLogger"]

DATA_WAIT = "time/data_wait"  # as `Throughput` logs it: a share of the seconds of training


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

    Beside it, `metrics.events.jsonl` says when the run started, logged, evaluated, saved and
    ended, with the seconds by phase; its lines "start" hold the hyperparameters, configuration,
    versions and command. It is never cut, so that `trainkit report` can tell what was trained
    twice.

    Args:
        path: The file; by default `<output_dir>/metrics.jsonl`.
    """

    _kind = JSONLTracker
    _events: EventLog | None = None
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
