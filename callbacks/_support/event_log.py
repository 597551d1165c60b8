"""When a run started, logged, evaluated, saved and ended: one line of JSON each, never cut."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.callbacks._support.run_facts import run_facts
from trainkit.outputs import Lines
from trainkit.training.run import Run

__all__ = ["EventLog", "events_path", "readable"]


def events_path(metrics: Path) -> Path:
    """Return the file of the events that belong to a file of figures."""
    return metrics.with_name(f"{metrics.stem}.events.jsonl")


def readable(value: Any) -> Any:
    """Return `value`, with numbers as text where strict JSON has none for them."""
    if isinstance(value, Mapping):
        return {name: readable(entry) for name, entry in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


class EventLog:
    """Appends what happens to a run, with the seconds that each phase has taken by then.

    Each line has `kind`, the counters, and `seconds`: those of this fit by phase. The line "start"
    has besides `time` (seconds since 1970) and what the run is made of. A resumed run adds to the
    file, so that it tells what was done twice; `metrics.jsonl` is cut.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self._run = run
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = Lines(path, "`JSONLLogger`")
        if is_torn:
            self._file.write("")  # the process before was killed while it wrote
        facts = readable(run_facts(run))
        self.write("start", time=time.time(), resumed_from=run.checkpoints.resumed_from, **facts)

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
        }
        self._file.write(json.dumps(entry | values, allow_nan=False))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
