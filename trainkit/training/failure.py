"""What is known of a run when it fails, for the notes of the error, the report and the watch."""

import math
from contextlib import suppress
from typing import Any

from trainkit.basics.config import Watchdog
from trainkit.errors import text_of
from trainkit.lazy import ask
from trainkit.training.run import Run

_LISTED = 4096  # samples of a window that a report lists
_LARGEST_ORDER = 5_000_000  # samples of an epoch whose order is made once more for a report


class RunProgress:
    """What the watch asks of a run."""

    def __init__(self, run: Run, watchdog: Watchdog | None) -> None:
        self.watchdog = watchdog or Watchdog()
        self.output_dir = run.output_dir
        self._run = run
        self._first_attempt = run.state.attempts

    def progress(self) -> tuple[str, bool, tuple[object, ...]]:
        """Return the phase, whether no step was made yet, and what changes with progress."""
        run = self._run
        attempts = run.state.attempts
        marks = (run.phase, attempts, run.processes.loaders.changes())
        return run.phase, attempts == self._first_attempt, marks

    def place(self) -> dict[str, Any]:
        """Return `step`, `epoch`, `phase` and `samples`."""
        return _where_run_is(self._run)


def report_failure(run: Run, error: BaseException) -> None:
    """Note on an error where the run was, write a report, and tell the other processes.

    Does not return where the error only came from the end of another process, which is the one
    that reports.
    """
    progress = _where_run_is(run)
    processes = run.strategy.processes
    alone = processes.size == 1
    hint = ask("hint_for")(type(error).__name__, text_of(error), alone=alone)
    error.add_note(
        f"trainkit: process {processes.rank} of {processes.size}, epoch {progress['epoch']}, after "
        f"step {progress['step']} ({run.state.epoch_samples} samples of this epoch consumed), "
        f"phase: {progress['phase']}."
    )
    if run.train_loader.parts and progress["phase"] == "train":
        error.add_note(f"trainkit: batches are mappings by loader, of {[*run.train_loader.parts]}.")
    # Of a lost peer the watch may know more, and some errors hold their hint.
    if hint and not ask("tells_of_lost_peer")(error) and hint not in text_of(error):
        error.add_note(f"trainkit: {hint}")
    progress["samples"] |= indices_of(run, progress["samples"])
    ask("tell_of_failure")(error, processes, progress, run.output_dir)


def _where_run_is(run: Run) -> dict[str, Any]:
    """Return where a run is; the samples are those of the window under way, by position.

    Once the gradients of a window are complete they are those of the next.
    """
    state, loader = run.state, run.train_loader
    first = state.epoch_samples
    total = loader.nominal_window(run.config.gradient_accumulation_steps)
    end = min(first + (total or run.objectives.samples), loader.samples_per_epoch or math.inf)
    samples = {"first": first, "last": int(end) - 1} if end > first else {}
    return {"step": state.step, "epoch": state.epoch, "phase": run.phase, "samples": samples}


def indices_of(run: Run, samples: dict[str, int]) -> dict[str, Any]:
    """Return the indices of a window in the data set, where its order can be made once more."""
    order = getattr(run.train_loader, "order_of", None)
    known = run.train_loader.samples_per_epoch
    if order is None or not samples or known is None or known > _LARGEST_ORDER:
        return {}
    with suppress(Exception):  # a sampler of others; the failure itself is what matters
        stop = min(samples["last"] + 1, samples["first"] + _LISTED)
        listed = order(run.data_epoch(run.state.epoch), samples["first"], stop)
        return {"indices": [index if isinstance(index, int) else repr(index) for index in listed]}
    return {}
