"""Write the metrics of a run to Weights & Biases."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.hparams import plain
from trainkit.basics.outputs import absolute, check_folder
from trainkit.basics.packages import require
from trainkit.callbacks._support.gradient_values import Histogram
from trainkit.callbacks._support.run_facts import run_facts
from trainkit.callbacks.logger import ServiceLogger
from trainkit.errors import ConfigError
from trainkit.trackers.wandb import WandBTracker
from trainkit.training.run import Run

__all__ = ["WandbLogger"]

OURS = {"id", "resume", "dir"}  # arguments of `wandb.init` that are set here

MODES = ("online", "offline", "disabled", "shared", None)


class WandbLogger(ServiceLogger):
    """Writes logged values as `train/<name>` and evaluations under their own names.

    The axis is `step`. Hyperparameters go into the W&B configuration; under `trainkit` it has the
    settings of the trainer, versions and command. A fit that is resumed from a checkpoint goes on
    in the same W&B run; steps that were trained twice are there twice, with the same values. A
    fit that raises ends the W&B run as failed; one that a signal ends, with the exit code of the
    program. Only the main process writes. A dry run is not logged.

    It needs the package `wandb`, which is imported when a fit starts. Without a network:
    `mode="offline"`, or the environment variable `WANDB_MODE=offline`, and `wandb sync` later.

    Args:
        project: Name of the project; None: what `wandb` chooses.
        directory: Where the files go, into a folder `wandb`; by default the output directory,
            else the present one.
        config: More for the W&B configuration, or other values, as `Trainer(hparams=...)` takes.
        **options: Of `wandb.init`, such as `name="first"`, `mode="offline"`, `tags=["tiny"]`.

    Raises:
        ConfigError: `wandb` is not installed, or `wandb.init` does not take an option.
    """

    _in_dry_run = True  # as "disabled"

    @checked
    def __init__(
        self,
        project: str | None = None,
        *,
        directory: str | Path | None = None,
        config: Any = None,
        **options: Any,
    ) -> None:
        require("wandb", "`WandbLogger`", ", or use `TensorBoardLogger` or `JSONLLogger`")
        if options:
            _check_options(options)
        self.project = project
        self.directory = None if directory is None else absolute(directory, "directory")
        self.config = plain(config, "config")
        self.options = options

    @override
    def check_output(self, run: Run) -> None:
        directory = self.directory or run.output_dir
        if directory is not None and run.is_main_process and run.internals.scratch is None:
            check_folder(directory / "wandb", f"`{self.name}`")

    @override
    def on_fit_start(self, run: Run) -> None:
        super().on_fit_start(run)
        if self._tracker is not None:
            self._tracker.run.define_metric("step")
            self._tracker.run.define_metric("*", step_metric="step")

    def add_histogram(self, run: Run, name: str, histogram: Histogram) -> None:
        """Draw a histogram under `name` at the present step; the main process calls it."""
        import numpy as np
        import wandb

        edges = np.asarray(histogram.edges)
        drawn = wandb.Histogram(np_histogram=(np.asarray(histogram.counts), edges))
        self._at_work().log({name: drawn, "step": run.state.step})

    @override
    def _make_tracker(self, run: Run) -> WandBTracker:
        folder = run.output_dir if self.directory is None else run.place(self.directory)
        given = self.options | ({} if run.internals.scratch is None else {"mode": "disabled"})
        return WandBTracker(self.project, id=self.run_id, resume="allow", dir=folder, **given)

    @override
    def _settings(self, run: Run) -> Mapping[str, Any]:
        return {**run.hparams, **self.config, "trainkit": run_facts(run)}

    @override
    def _log(self, values: dict[str, Any], step: int) -> None:
        # Not as W&B's own step, which cannot go back to that of a checkpoint.
        self._tracker.log({**values, "step": step})


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
