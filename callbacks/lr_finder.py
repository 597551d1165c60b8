"""Try learning rates before the first step, show what they do to the loss, and leave no trace."""

import math
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics import rng
from trainkit.basics.config import check_whole, checked
from trainkit.callbacks._support.memory_trial import TrainedState
from trainkit.data import Window
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.callback_list import CallbackList
from trainkit.training.logging import LogSums
from trainkit.training.loop import train_step
from trainkit.training.run import Run
from trainkit.training.run_parts import Requests, TrainState
from trainkit.training.several.optimizers import refuse_several
from trainkit.training.unchanged import kept
from trainkit.types import StepResult

__all__ = ["LRFinder"]

SMOOTHING = 0.9  # share of the past in the smoothed loss
DIVERGED = 3.0  # how much worse than the best, in units of the best or of what was gained
MOST_SKIPS = 10  # windows in a row without an update, after which the rate is too high


class LRFinder(Callback):
    """Tries learning rates from low to high before the first step, and suggests one.

    Each update has a higher rate than the one before, and the windows are those with which the
    training begins, again and again where the epoch is short. It ends early where the loss
    diverges. Then weights, buffers, the optimizer, the loss scale, random streams and the position
    in the data are what they were, to the last bit. Schedules and other callbacks see nothing of
    it; clipping, accumulation, precision and strategy are those of the training. Groups of the
    optimizer keep the ratio of their rates; those that are told are of the first.

    Args:
        min_lr: The rate of the first update.
        max_lr: That of the last one.
        num_steps: Updates that are tried; in a dry run as many as it has.
        stop: End the run then, before its first step; a dry run goes on. False: train on with the
            rate that was given.

    Attributes:
        rates: Those that were tried, but for the one at which the loss diverged.
        losses: The mean loss of each over all processes, before its update.
        suggestion: Where the smoothed loss falls most steeply; None where it never fell.

    Raises:
        ConfigError: The rates are not in order; the data can be read only once.
    """

    alike = ("min_lr", "max_lr", "num_steps", "stop")

    @checked
    def __init__(
        self, *, min_lr: float = 1e-7, max_lr: float = 1.0, num_steps: int = 100, stop: bool = True
    ) -> None:
        if not 0 < min_lr < max_lr < math.inf:
            raise ConfigError(
                "`min_lr` must be above 0 and below `max_lr`, both finite, but they are "
                f"{min_lr!r} and {max_lr!r}."
            )
        check_whole("num_steps", num_steps, 2)
        self.min_lr = min_lr
        self.max_lr = max_lr
        self.num_steps = num_steps
        self.stop = stop
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.suggestion: float | None = None

    @override
    def on_epoch_start(self, run: Run) -> None:
        if run.state.attempts:
            return
        refuse_several(run.optimizer, "`LRFinder`")
        self.rates, self.losses = [], []
        with _unchanged(run):
            self._search(run, run.config.dry_run or self.num_steps)
        self.suggestion = _steepest(self.rates, _smoothed(self.losses))
        best = self.suggestion
        advice = "never falls" if best is None else f"falls most steeply at {best:.3g}"
        where = ""
        if run.output_dir is not None and self.rates and find_spec("matplotlib") is not None:
            where = f" The curve: `{run.output_dir / 'lr_finder.png'}`."
            if run.is_main_process:
                self.plot(run.output_dir / "lr_finder.png")
        tried = f"{self.name} tried {len(self.rates)} learning rates"
        run.print(f"trainkit: {tried}: the loss {advice}.{where}")
        if self.stop and run.config.dry_run is None:
            run.evaluation.at_end = False
            run.checkpoints.saved_attempt = run.state.attempts  # nothing was trained to be saved
            run.request_stop(self.name, agreed=True)

    def plot(self, path: str | Path | None = None) -> Any:
        """Return the curve as a figure of matplotlib, and write it to `path` if there is one."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, color="#b3bcc9", label="loss")
        axes.plot(self.rates, _smoothed(self.losses), color="#2f6fde", label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion: {self.suggestion:.3g}"
            axes.axvline(self.suggestion, color="#d9730d", linestyle="--", label=label)
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend(frameon=False)
        if path is not None:
            figure.savefig(path, dpi=110)
        return figure

    def _search(self, run: Run, steps: int) -> None:
        growth = (self.max_lr / self.min_lr) ** (1 / max(1, steps - 1))
        groups, watch, skips = run.optimizer.param_groups, _Watch(), 0
        given = [float(group.get("initial_lr", group["lr"])) for group in groups]
        with closing(_windows(run)) as windows:
            for number, window in enumerate(islice(windows, steps)):
                rate = self.min_lr * growth**number
                for group, own in zip(groups, given, strict=True):
                    group["lr"] = rate * own / given[0] if given[0] else rate
                train_step(run, CallbackList([watch]), window)
                skips = skips + 1 if watch.loss is None else 0
                if watch.loss is not None and not _has_diverged([*self.losses, watch.loss]):
                    self.rates.append(rate)
                    self.losses.append(watch.loss)
                elif not 0 < skips <= MOST_SKIPS:
                    break


class _Watch(Callback):
    """Keeps the loss of the latest window over all processes; None where it was skipped."""

    loss: float | None = None

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        sums = LogSums()
        sums.add("loss", result.loss, result.weight)
        self.loss = sums.reduce(run.strategy.data_processes).get("loss", math.nan)

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self.loss = None


@contextmanager
def _unchanged(run: Run) -> Iterator[None]:
    """Let updates be made inside that change nothing which the training will see."""
    before, scale = TrainedState(run), run.precision.state_dict()
    present = run.state, run.requests, run.lr_schedule
    owner = getattr(run.training_step, "__self__", None)  # the trainer
    weightings = [each.weighting for each in run.objectives.active]
    held = kept(run.module, owner, *weightings, run.precision)
    try:
        with held, rng.preserved(run.strategy.device), run.logging.apart():
            run.state, run.requests, run.lr_schedule = TrainState(), Requests(), None
            yield
    finally:
        run.state, run.requests, run.lr_schedule = present
        before.put_back()
        run.precision.load_state_dict(scale)


def _windows(run: Run) -> Generator[Window, None, None]:
    """Yield the windows of the first epoch again and again; in the end it has not begun."""
    loader, stream = run.train_loader, run.train_loader.stream
    if any(
        isinstance(one, Iterator) for one in (loader.source, getattr(loader.source, "dataset", 0))
    ):
        raise ConfigError("`LRFinder` needs data that can be read twice, not an iterator.")
    position = {} if stream is None else stream.state_dict()
    while True:
        run.state.epoch_samples = 0
        if stream is not None:
            stream.is_trial = True
        try:
            with closing(run.windows()) as windows:
                yield from windows
        finally:
            loader.keep_order()
            if stream is not None:
                loader.close()  # lasting workers have gone on
                stream.load_state_dict(position)
                stream.is_trial = False


def _smoothed(losses: list[float]) -> list[float]:
    smoothed, mean = [], 0.0
    for number, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed.append(mean / (1 - SMOOTHING**number))
    return smoothed


def _has_diverged(losses: list[float]) -> bool:
    smoothed = _smoothed(losses)
    best = min(smoothed)
    return not smoothed[-1] <= best + DIVERGED * max(abs(best), abs(smoothed[0] - best))


def _steepest(rates: list[float], smoothed: list[float]) -> float | None:
    """Return the rate around which the loss falls most on its way to the lowest, if ever."""
    reach = max(1, len(smoothed) // 10)  # single batches differ by themselves
    way = smoothed[: smoothed.index(min(smoothed)) + 1] if smoothed else []
    falls = [after - before for before, after in zip(way, way[2 * reach :], strict=False)]
    lowest = min(falls, default=0.0)
    return None if lowest >= 0 else rates[falls.index(lowest) + reach]
