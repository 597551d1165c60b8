"""Write the metrics of a run to Weights & Biases."""

import importlib.util
import inspect
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trainkit.callbacks._support.histograms import Histogram
from trainkit.callbacks._support.run_facts import run_facts
from trainkit.checkpoint.format.value_checks import maybe, record, text
from trainkit.config import checked
from trainkit.errors import ConfigError
from trainkit.outputs import absolute, check_folder
from trainkit.signals import exit_code
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars

if TYPE_CHECKING:
    import wandb

__all__ = ["WandbLogger"]

OURS = {"id", "resume", "dir", "config"}  # arguments of `wandb.init` that are set here

MODES = ("online", "offline", "disabled", "shared", None)


class WandbLogger(Callback):
    """Writes logged values as `train/<name>` and evaluations under their own names.

    The axis is `step`. Configuration, versions and command go into the W&B configuration. A fit
    that is resumed from a checkpoint goes on in the same W&B run; steps that were trained twice
    are there twice, with the same values. A fit that raises ends the W&B run as failed; one that
    a signal ends, with the exit code of the program. Only the main process writes.

    It needs the package `wandb`, which is imported when a fit starts. Without a network:
    `mode="offline"`, or the environment variable `WANDB_MODE=offline`, and `wandb sync` later.

    Args:
        project: Name of the project; None: what `wandb` chooses.
        directory: Where the files go, into a folder `wandb`; by default the output directory,
            else the present one.
        **options: Of `wandb.init`, such as `name="first"`, `mode="offline"`, `tags=["tiny"]`.

    Raises:
        ConfigError: `wandb` is not installed, or `wandb.init` does not take an option.
    """

    per_process = False  # only the main process has an id

    @checked
    def __init__(
        self, project: str | None = None, *, directory: str | Path | None = None, **options: Any
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "`WandbLogger` needs the package `wandb`, which is not installed. Run `pip "
                "install wandb`, or use `TensorBoardLogger` or `JSONLLogger`."
            )
        if options:
            _check_options(options)
        self.project = project
        self.directory = None if directory is None else absolute(directory, "directory")
        self.options = options
        self._id: str | None = None
        self._run: wandb.Run | None = None
        self._failed = False

    @override
    def check_output(self, run: Run) -> None:
        place = self.directory or run.output_dir
        if place is not None and run.is_main_process:
            check_folder(place / "wandb", f"`{self.name}`")

    @override
    def on_fit_start(self, run: Run) -> None:
        self._failed = False
        if run.state.attempts == 0:  # else the state was loaded before
            self._id = None
        if not run.is_main_process:
            return
        import wandb  # takes seconds

        self._id = self._id or uuid.uuid4().hex
        self._run = wandb.init(
            project=self.project,
            id=self._id,
            resume="allow",
            dir=self.directory or run.output_dir,
            config=run_facts(run),
            **self.options,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        self._add(run, {f"train/{name}": value for name, value in values.items()})

    @override
    def on_late_log(self, run: Run, values: Scalars) -> None:
        self.on_log(run, values)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self._add(run, metrics)

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._failed = True

    @override
    def on_fit_end(self, run: Run) -> None:
        if self._run is not None:
            signum = run.requests.signal
            code = 1 if self._failed else exit_code(signum) if signum else 0
            self._run.finish(exit_code=code)
            self._run = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._id}

    @override
    def check_state_dict(self, run: Run, state: Mapping[str, Any]) -> None:
        record({"run_id": maybe(text)}, closed=True)(state)

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._id = state["run_id"]

    def add_histogram(self, run: Run, name: str, histogram: Histogram) -> None:
        """Draw a histogram under `name` at the present step; the main process calls it."""
        import numpy as np
        import wandb

        if self._run is None:
            raise ConfigError(
                f"`{self.name}` was given a histogram, but is not among the callbacks of the run. "
                "Put the same logger into `Trainer(callbacks=[...])`."
            )
        drawn = wandb.Histogram(
            np_histogram=(np.asarray(histogram.counts), np.asarray(histogram.edges))
        )
        self._add(run, {name: drawn})

    def _add(self, run: Run, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.log({**values, "step": run.state.step})


def _check_options(options: Mapping[str, Any]) -> None:
    import wandb

    known = sorted({*inspect.signature(wandb.init).parameters} - OURS - {"project"})
    for name in options:
        if name not in known:
            hint = " It is set by trainkit." if name in OURS else ""
            raise ConfigError(
                f"`WandbLogger` was given {name!r}, which it does not take.{hint} Of `wandb.init` "
                f"it takes {known}."
            )
    if options.get("mode") not in MODES:
        raise ConfigError(f"`mode` must be one of {MODES}, but is {options['mode']!r}.")
