"""Show how far a training is: in a terminal, in a notebook, in a log file."""

import math
import sys
import textwrap
import time
from collections.abc import Iterator

from torch import Tensor
from typing_extensions import override

from trainkit.basics.formatting import clock
from trainkit.callbacks._support.formatting import by_loader
from trainkit.callbacks._support.progress_display import Display, Progress, choose_display
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars, StepResult

__all__ = ["ProgressBar"]

REFRESH_SECONDS = 0.2
COLUMNS = 79  # of a line that is to fit everywhere
NEWEST = 0.3  # share of the latest interval in the speed that is shown


class ProgressBar(Callback):
    """Shows epoch, loss, learning rate, samples per second and the time left, all the fit in one.

    The main process writes to stderr: one bar in a terminal or a notebook; elsewhere, such as in
    a log file, a plain line every 30 seconds. Each evaluation gets a line on stdout, so that a
    log file has the table of them: epoch, step, time since the start, loss of the latest step of
    training, metrics. It stands above the bar, as does whatever is printed during the fit.

    The loss is that of one step on the main process. On accelerators it is read at log steps only,
    because reading it more often would hold up the device. The mean over steps and processes is
    what loggers write; this callback does not ask for it, so that it costs almost nothing.
    """

    def __init__(self) -> None:
        self._display: Display | None = None
        self._next_refresh = math.inf  # on the clock of time.monotonic

    @override
    def on_fit_start(self, run: Run) -> None:
        self._close()
        self._is_cpu = run.strategy.device.type == "cpu"
        # A run that is resumed after its end begins no other epoch.
        self._epoch = max(1, run.state.epoch + (run.end_reached is None))
        self._start, self._initial = time.monotonic(), run.state.step
        self._latest: StepResult | None = None
        self._loss: float | None = None
        self._rate: float | None = None  # as of the latest read
        self._speed: float | None = None  # samples/s
        self._evaluated = 0  # batches in the evaluation under way
        self._mark = (time.monotonic(), run.state.samples_seen)
        if run.is_main_process and sys.stderr is not None:  # it was closed from the start
            self._display = choose_display(sys.stderr)
            self._next_refresh = 0.0

    @override
    def on_epoch_start(self, run: Run) -> None:
        self._epoch = run.state.epoch + 1
        now = time.monotonic()
        if run.state.samples_seen == self._mark[1]:
            self._mark = (now, run.state.samples_seen)  # what came before was no training
        self._show(run, now)
        self._next_refresh = min(self._next_refresh, now)  # the first step is shown at once

    @override
    def on_step_start(self, run: Run) -> None:
        if run.state.step + 1 == run.planned_steps:
            self._rate = _learning_rate(run)  # after this update the schedule is at its end

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._display is None:
            return
        self._latest = result
        now, is_last = time.monotonic(), run.state.step == run.planned_steps
        is_due = is_last or now >= self._next_refresh
        if is_due if self._is_cpu else is_last or run.is_log_step:
            self._loss = result.loss.item()
            self._rate = self._rate if is_last else _learning_rate(run)
        if is_due:
            self._show(run, now)

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        now = time.monotonic()
        if now >= self._next_refresh:
            self._show(run, now)

    @override
    def on_evaluation_start(self, run: Run) -> None:
        self._evaluated = 0
        self._show(run, time.monotonic(), evaluation=True)

    @override
    def on_evaluation_batch_end(self, run: Run) -> None:
        self._evaluated += 1
        now = time.monotonic()
        if now >= self._next_refresh:
            self._show(run, now, evaluation=True)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        if self._display is not None:
            self._mark = (time.monotonic(), run.state.samples_seen)
            if self._latest is not None:
                self._loss = self._latest.loss.item()  # the evaluation has waited for the device
            self._show(run, self._mark[0])  # first, because a note draws the bar anew
            self._display.note("\n".join(self._evaluation_lines(run, metrics)))

    @override
    def on_fit_end(self, run: Run) -> None:
        self._show(run, time.monotonic())
        self._close()

    def _show(self, run: Run, now: float, *, evaluation: bool = False) -> None:
        if self._display is None:
            return
        self._next_refresh = now + REFRESH_SECONDS
        self._measure(run, now)
        batches = [loader.batches_per_epoch for loader in run.evaluation.loaders.values()]
        of = "" if None in batches else f"/{sum(count or 0 for count in batches)}"
        texts = [  # narrow terminals leave out the last ones
            f"evaluating {self._evaluated}{of}" if evaluation else None,
            None if self._loss is None else f"loss {self._loss:.4g}",
            None if self._rate is None else f"lr {self._rate:.3g}",
            None if self._speed is None else f"{self._speed:,.0f} samples/s",
            f"{run.state.skipped_steps} skipped" if run.state.skipped_steps else None,
        ]
        self._display.show(
            Progress(
                title=self._title(run),
                step=run.state.step,
                details=tuple(text for text in texts if text is not None),
                total=run.planned_steps,
                initial=self._initial,
                seconds=now - self._start,
            )
        )

    def _title(self, run: Run) -> str:
        epochs = run.config.max_epochs
        most = "" if epochs is None else f"{epochs}"
        return f"epoch {self._epoch:>{len(most)}}" + (most and f"/{most}")

    def _evaluation_lines(self, run: Run, metrics: Scalars) -> Iterator[str]:
        """Yield an evaluation as the rows of a table, as wide as a terminal."""
        width = len(str(run.planned_steps or ""))
        seconds = time.monotonic() - self._start
        head = [self._title(run), f"step {run.state.step:>{width}}", clock(seconds)]
        if self._loss is not None:
            head.append(f"train loss {self._loss:<6.4g}")
        for label, values in by_loader(metrics, run.evaluation.loaders).items():
            cells = [f"{name} {value:<6.4g}" for name, value in values.items()]
            cells = [*head, f"{label} {cells[0]}", *cells[1:]]
            # A cell holds spaces, at which no line may break.
            row = "  ".join(cell.replace(" ", "\xa0") for cell in cells)
            lines = textwrap.wrap(row, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
            yield from (line.replace("\xa0", " ").rstrip() for line in lines)

    def _measure(self, run: Run, now: float) -> None:
        """Bring the speed up to date; evaluations are left out of it."""
        since, samples = self._mark
        done = run.state.samples_seen - samples
        if done and now - since >= REFRESH_SECONDS / 2:  # less is too short to measure
            speed = done / (now - since)
            old = speed if self._speed is None else self._speed
            self._speed = old + NEWEST * (speed - old)
            self._mark = (now, run.state.samples_seen)

    def _close(self) -> None:
        self._next_refresh = math.inf
        if self._display is not None:
            self._display.close()
            self._display = None


def _learning_rate(run: Run) -> float:
    rate = run.optimizer.param_groups[0]["lr"]
    return rate.item() if isinstance(rate, Tensor) else float(rate)
