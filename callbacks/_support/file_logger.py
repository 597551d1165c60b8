"""What loggers share that write a file of lines."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.callbacks._support.log_paths import log_place, move_away
from trainkit.callbacks.logger import Logger
from trainkit.config import checked
from trainkit.outputs import absolute, check_file, claim
from trainkit.trackers.files import FileTracker
from trainkit.training.run import Run
from trainkit.training.state import TrainState
from trainkit.types import StepResult

__all__ = ["FileLogger"]

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
            claim(run.outputs, each, f"`{self.name}`")
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
        elif path.is_file():
            tracker.cut(partial(_is_up_to, run.state))
        return tracker

    @override
    def _write(self, run: Run, kind: str, values: Mapping[str, float]) -> None:
        state = run.state
        place = {"epoch": state.epoch, "samples": state.samples_seen, "kind": kind}
        if self._tracker is not None:
            named = {f"log/{n}" if n in RESERVED else n: value for n, value in values.items()}
            self._tracker.log(place | named, step=state.step)

    def _files(self, path: Path) -> tuple[Path, ...]:
        """Return all that is written."""
        return (path, path.with_name(f"{path.stem}.hparams.json"))

    def _log_path(self, run: Run) -> Path:
        name = f"metrics.{self._kind.name}"
        return log_place(run, self.path, name, owner=type(self).__name__, argument="path")


def _is_up_to(state: TrainState, entry: Mapping[str, Any]) -> bool:
    """Return whether an entry was written until `state`; its values may be texts."""
    # A skipped window moves on in the data but not in the steps.
    seen = int(entry["step"]) <= state.step and int(entry["samples"]) <= state.samples_seen
    skips = int(entry["skipped_steps"]) if entry["kind"] == "skip" else 0
    return seen and skips <= state.skipped_steps
