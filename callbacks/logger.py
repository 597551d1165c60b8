"""Pass on what a run logs to a tracker."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from trainkit.basics.signals import exit_code
from trainkit.callbacks._support.kept import Keeps
from trainkit.errors import ConfigError
from trainkit.trackers.tracker import GeneralTracker
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars

__all__ = ["Logger", "ServiceLogger"]


class Logger(Callback):
    """Gives a tracker what the run logs, on the main process.

    Logged values come as `train/<name>`, evaluations under their own names, both with
    `run.state.step`. The hyperparameters come before them. All loggers of trainkit are made so;
    with this one a tracker that was written for `Accelerator(log_with=...)` works here too. It is
    given nothing in a dry run.

    Args:
        tracker: Of your own class over `trainkit.GeneralTracker`.
    """

    _tracker: Any = None  # at work, on the main process
    _failed = False
    _in_dry_run = False  # what a service was told nobody takes back

    def __init__(self, tracker: GeneralTracker) -> None:
        if not isinstance(tracker, GeneralTracker):
            raise ConfigError(
                f"`tracker` must be a `trainkit.GeneralTracker`, but is {tracker!r}. Write a class "
                "over it, or take the logger of the service."
            )
        self._given = tracker

    @override
    def on_fit_start(self, run: Run) -> None:
        if run.is_main_process and (run.internals.scratch is None or self._in_dry_run):
            self._failed = False
            tracker = self._make_tracker(run)
            tracker.owner = f"`{self.name}`"
            tracker.start()
            self._tracker = tracker
            if settings := self._settings(run):
                tracker.store_init_configuration(dict(settings))

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        self._write(run, "train", values)

    @override
    def on_late_log(self, run: Run, values: Scalars) -> None:
        self.on_log(run, values)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self._write(run, "eval", metrics)

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._failed = True

    @override
    def on_fit_end(self, run: Run) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            signum = run.requests.signal
            tracker.exit_code = 1 if self._failed else exit_code(signum) if signum else 0
            tracker.finish()

    def _make_tracker(self, run: Run) -> GeneralTracker:
        """Return what writes, before it starts; its place is made ready."""
        return self._given

    def _settings(self, run: Run) -> Mapping[str, Any]:
        """Return what the tracker is told of the run at first."""
        return run.hparams

    def _write(self, run: Run, kind: str, values: Mapping[str, float]) -> None:
        """Write what came of training ("train") or of an evaluation ("eval")."""
        prefix = "train/" if kind == "train" else ""
        if self._tracker is not None:
            self._log({f"{prefix}{name}": value for name, value in values.items()}, run.state.step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._tracker.log(values, step=step)

    def add_image(self, run: Run, name: str, image: Any) -> None:
        """Show an image under `name` at the present step; the other processes may call it too.

        Args:
            run: Of the fit that this logger is a callback of.
            name: Such as "samples/first".
            image: A tensor or array [channels, height, width] with 1, 3 or 4 channels; bytes, or
                floats from 0 to 1. Several: `torchvision.utils.make_grid(images)` makes one.

        Raises:
            ConfigError: This logger has no place for images, or is not at work.
        """
        self._add(run, "image", name, image)

    def add_figure(self, run: Run, name: str, figure: Any) -> None:
        """Show a figure of matplotlib, as `add_image` does an image."""
        self._add(run, "figure", name, figure)

    def add_text(self, run: Run, name: str, text: str) -> None:
        """Show a text, as `add_image` does an image."""
        self._add(run, "text", name, text)

    def _add(self, run: Run, kind: str, name: str, value: Any) -> None:
        if not run.is_main_process:
            return
        log = getattr(self._at_work(kind), f"log_{kind}", None)
        if log is None:
            raise ConfigError(
                f"`{self.name}` has no place for {kind}s. Give them to a `TensorBoardLogger`, a "
                "`WandbLogger` or an `MLflowLogger`."
            )
        log(name, value, run.state.step)

    def _at_work(self, given: str = "histogram") -> Any:
        """Return the tracker, for a histogram or the like."""
        if self._tracker is None:
            raise ConfigError(
                f"`{self.name}` was given `add_{given}`, but is not among the callbacks of the "
                "run. Put the same logger into `Trainer(callbacks=[...])`."
            )
        return self._tracker


class ServiceLogger(Keeps, Logger):
    """Keeps the id of the run there in the checkpoints, so that a resumed fit goes on in it."""

    _kept: ClassVar = {"run_id": str | None}
    per_process = False  # only the main process has an id

    run_id: str | None = None
    """The run there, while and after this one trains; on the main process."""

    @override
    def on_fit_start(self, run: Run) -> None:
        if run.state.attempts == 0:  # else the state was loaded before
            self.run_id = None
        super().on_fit_start(run)
        if self._tracker is not None:
            self.run_id = self._tracker.run_id
