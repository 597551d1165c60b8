"""Write the metrics of a run for TensorBoard."""

from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from trainkit.callbacks._support.histograms import Histogram
from trainkit.callbacks._support.log_paths import giving_up, log_place
from trainkit.config import checked
from trainkit.errors import ConfigError
from trainkit.outputs import absolute, check_folder
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["TensorBoardLogger"]

FLUSH_SECONDS = 30


class TensorBoardLogger(Callback):
    """Writes logged values as `train/<name>` and evaluations under their own names.

    The axis is `run.state.step`. A resumed run takes what was written after its step out of the
    curves. A new run in a folder that holds the events of an old one takes those out of the
    curves; their files stay. Only the main process writes.

    Args:
        directory: Folder of the event files; by default `<output_dir>/tensorboard`.
    """

    @checked
    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = None if directory is None else absolute(directory, "directory")
        self._writer: SummaryWriter | None = None

    @override
    def check_output(self, run: Run) -> None:
        place = self._log_folder(run)
        if run.is_main_process:
            check_folder(place, f"`{self.name}`")

    @override
    def on_fit_start(self, run: Run) -> None:
        place = self._log_folder(run)
        if not run.is_main_process:
            return
        from torch.utils.tensorboard.writer import SummaryWriter  # takes seconds

        self._writer = SummaryWriter(
            str(place), purge_step=_first_new_step(run, place), flush_secs=FLUSH_SECONDS
        )

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        self._add(run, {f"train/{name}": value for name, value in values.items()})

    @override
    def on_late_log(self, run: Run, values: Scalars) -> None:
        self.on_log(run, values)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self._add(run, metrics)
        with giving_up(self.name, self._give_up):
            if self._writer is not None:
                self._writer.flush()

    @override
    def on_fit_end(self, run: Run) -> None:
        with giving_up(self.name, self._give_up):
            if self._writer is not None:
                self._writer.close()  # flushes
        self._writer = None

    def add_histogram(self, run: Run, name: str, histogram: Histogram) -> None:
        """Draw a histogram under `name` at the present step; the main process calls it."""
        if self._writer is None:
            raise ConfigError(
                f"`{self.name}` was given a histogram, but is not among the callbacks of the run. "
                "Put the same logger into `Trainer(callbacks=[...])`."
            )
        counts, centers = histogram.counts, histogram.centers
        self._writer.add_histogram_raw(
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

    def _log_folder(self, run: Run) -> Path:
        return log_place(
            run, self.directory, "tensorboard", owner="TensorBoardLogger", argument="directory"
        )

    def _add(self, run: Run, values: Scalars) -> None:
        with giving_up(self.name, self._give_up):
            for name, value in values.items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, run.state.step)

    def _give_up(self) -> None:
        self._writer = None  # whose thread has ended, so that nothing more could come into its file


def _first_new_step(run: Run, place: Path) -> int | None:
    """Return the step from which older events no longer count; None where there are none."""
    if run.state.step > 0:
        return run.state.step + 1  # what was written at the step itself is not written again
    return 0 if any(place.glob("events.out.tfevents.*")) else None
