"""Write the metrics of a run for TensorBoard."""

from collections.abc import Mapping
from operator import mul
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.outputs import absolute, check_folder
from trainkit.basics.packages import require
from trainkit.basics.written_files import claim
from trainkit.callbacks._support.gradient_values import Histogram
from trainkit.callbacks._support.log_paths import free_number, log_place
from trainkit.callbacks.logger import Logger
from trainkit.trackers.tensorboard import TensorBoardTracker
from trainkit.training.run import Run

__all__ = ["TensorBoardLogger"]

FLUSH_SECONDS = 30


class TensorBoardLogger(Logger):
    """Writes logged values as `train/<name>` and evaluations under their own names.

    The axis is `run.state.step`. Hyperparameters are on the page HPARAMS, with the last value of
    each metric. A resumed run takes what was written after its step out of the curves; of its
    hyperparameters TensorBoard shows those of the first start. A window without an update stays at
    its step: what follows it comes into a new file, which a run that is resumed from before it
    renames to `events.out.left-out.*`. A new run moves the event files of an older one to
    `<directory>.1`, or the next number that is free. Only the main process writes.

    Args:
        directory: Folder of the event files; by default `<output_dir>/tensorboard`.
    """

    _in_dry_run = True

    @checked
    def __init__(self, directory: str | Path | None = None) -> None:
        require("tensorboard", f"`{type(self).__name__}`", ", or use `JSONLLogger`")
        self.directory = None if directory is None else absolute(directory, "directory")

    @override
    def check_output(self, run: Run) -> None:
        folder = self._log_folder(run)
        if run.is_main_process:
            claim(run.internals.outputs, folder, f"`{self.name}`")
            check_folder(folder, f"`{self.name}`")

    def add_histogram(self, run: Run, name: str, histogram: Histogram) -> None:
        """Draw a histogram under `name` at the present step; the main process calls it."""
        counts, centers = histogram.counts, histogram.centers
        tracker = self._at_work()
        self._begin_file(run)
        tracker.writer.add_histogram_raw(
            name,
            min=histogram.low,
            max=histogram.high,
            num=sum(counts),
            # Not drawn; as exact as the bins are narrow.
            sum=sum(map(mul, counts, centers)),
            sum_squares=sum(map(mul, counts, (center**2 for center in centers))),
            bucket_limits=histogram.edges[1:],
            bucket_counts=counts,
            global_step=run.state.step,
        )

    @override
    def _make_tracker(self, run: Run) -> TensorBoardTracker:
        folder, state = self._log_folder(run), run.state
        if state.attempts == 0:
            _move_away(folder)
        else:
            _leave_out(folder, state.skipped_steps)
        # What was written at the step itself is not written again.
        purge = None if state.attempts == 0 else state.step + 1
        return TensorBoardTracker(
            "",
            folder,
            purge_step=purge,
            flush_secs=FLUSH_SECONDS,
            filename_suffix=_suffix(state.skipped_steps),
        )

    @override
    def _write(self, run: Run, kind: str, values: Mapping[str, float]) -> None:
        self._begin_file(run)
        super()._write(run, kind, values)

    @override
    def _add(self, run: Run, kind: str, name: str, value: Any) -> None:
        self._begin_file(run)
        super()._add(run, kind, name, value)

    def _begin_file(self, run: Run) -> None:
        """Go on in a new file if a window was skipped since the last event."""
        if self._tracker is not None:
            self._tracker.begin_file(_suffix(run.state.skipped_steps))

    def _log_folder(self, run: Run) -> Path:
        return log_place(
            run, self.directory, "tensorboard", owner="TensorBoardLogger", argument="directory"
        )


def _suffix(skipped_steps: int) -> str:
    """Return how the name of a file ends whose events came after so many skipped windows."""
    return f".skipped-{skipped_steps}" if skipped_steps else ""


def _leave_out(folder: Path, skipped_steps: int) -> None:
    """Rename the files that were begun after more skipped windows: TensorBoard reads them no more.

    Their first events may stand at the very step from which the run goes on.
    """
    for path in folder.glob("events.out.tfevents.*.skipped-*"):
        count = path.name.rpartition("-")[2]
        if count.isdecimal() and int(count) > skipped_steps:
            path.rename(path.with_name(path.name.replace("tfevents", "left-out", 1)))


def _move_away(folder: Path) -> None:
    """Move old events into a folder beside: TensorBoard shows hyperparameters that came first."""
    old = [*folder.glob("events.out.tfevents.*")]
    if old:
        other = folder.with_name(f"{folder.name}.{free_number(folder)}")
        other.mkdir()
        for path in old:
            path.rename(other / path.name)
