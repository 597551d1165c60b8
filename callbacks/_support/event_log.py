"""When a run started, logged, evaluated, saved and ended: one line of JSON each, never cut."""

import json
import time
from pathlib import Path
from typing import Any

from trainkit.callbacks._support.run_facts import run_facts
from trainkit.formatting import json_value
from trainkit.outputs import Lines
from trainkit.training.run import Run

__all__ = ["EventLog", "events_path"]


def events_path(metrics: Path) -> Path:
    """Return the file of the events that belong to a file of metrics."""
    return metrics.with_name(f"{metrics.stem}.events.jsonl")


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
        came_from = run.checkpoints.resumed_from
        facts = {"hparams": run.hparams, **run_facts(run)}
        self.write("start", time=time.time(), resumed_from=came_from, **facts)

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
        self._file.write(json.dumps(json_value(entry | values), allow_nan=False))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
