"""Say what is about to be trained, and what came of it."""

import shutil
import sys
import textwrap
import time
from itertools import chain, repeat
from pathlib import Path

from typing_extensions import override

from trainkit.basics.formatting import clock, count, visible
from trainkit.callbacks._support.formatting import values_by_loader
from trainkit.training.callback import Callback
from trainkit.training.facts import describe_window, parameter_counts
from trainkit.training.run import Run
from trainkit.training.setup.schedule_check import describe
from trainkit.types import class_name

__all__ = ["Summary"]

SHOWN_FILES = 8
BEFORE = 16  # columns in front of a text


class Summary(Callback):
    """Prints the make-up of a run at its start and its outcome at the end, on the main process."""

    def __init__(self) -> None:
        self._start: float | None = None
        self._error: BaseException | None = None

    @override
    def on_fit_start(self, run: Run) -> None:
        self._start = time.monotonic()
        self._error = None
        run.print(_block(f"trainkit: training {class_name(run.module)}", _what_is_trained(run)))

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._error = error

    @override
    def on_fit_end(self, run: Run) -> None:
        if self._start is None:
            return  # a callback further up failed before this one began
        seconds = clock(time.monotonic() - self._start)
        self._start = None
        if self._error is None:
            title = f"trainkit: done in {seconds} ({run.stop_reason})"
        else:
            title = f"trainkit: ended by {type(self._error).__name__} after {seconds}"
            self._error = None  # its traceback holds the whole run
        run.print(_block(title, _outcome(run)))


def _block(title: str, rows: dict[str, str]) -> str:
    lines, in_terminal = [title], sys.stdout is not None and sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if in_terminal else sys.maxsize
    width = max(columns - BEFORE - 1, BEFORE)  # narrower ones break lines themselves
    for name, text in rows.items():
        labels = chain([name], repeat(""))  # only the first line of a text has it
        for part in text.splitlines():
            cut = textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False)
            lines += (f"  {next(labels):<13} {line}" for line in cut)
    return visible("\n".join(lines))


def _what_is_trained(run: Run) -> dict[str, str]:
    total, trainable = parameter_counts(run.module)
    planned = (run.planned_steps, "step"), (run.config.max_epochs, "epoch")
    return {
        "parameters": f"{total:,} ({trainable:,} trainable)",
        "strategy": f"{run.strategy.name}, {count(run.processes.num_processes, 'process')}, "
        f"{run.strategy.device}",
        "precision": run.precision.name,
        "window": describe_window(run.train_loader, run.config.gradient_accumulation_steps),
        "planned": ", ".join(count(number, noun) for number, noun in planned if number is not None),
        "learning rate": ""
        if run.lr_schedule is None
        else describe(run.lr_schedule, run.planned_steps, run.config.max_epochs),
        "output": "" if run.output_dir is None else str(run.output_dir),
    }


def _outcome(run: Run) -> dict[str, str]:
    state = run.state
    order = dict.fromkeys([*run.metrics, *run.best_metrics])  # of the last evaluation
    best = {name: run.best_metrics[name] for name in order if name in run.best_metrics}
    best_lines = values_by_loader(best, run.evaluation.loaders)
    last = values_by_loader(run.metrics, run.evaluation.loaders)
    skipped = f", {state.skipped_steps:,} skipped" if state.skipped_steps else ""
    return {
        "steps": f"{state.step:,}{skipped} ({count(state.epoch, 'epoch')} completed, "
        f"{count(state.samples_seen, 'sample')})",
        "best": "\n".join(best_lines),
        "last": "\n".join(line for line in last if line not in best_lines),
        "files": "" if run.output_dir is None else _files(run.output_dir),
    }


def _files(folder: Path) -> str:
    """Return the folder and what is in it."""
    if not folder.is_dir():
        return ""
    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    names = [f"{path.name}/" if path.is_dir() else path.name for path in entries]
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return f"{folder}: {', '.join(names[:SHOWN_FILES])}{more}" if names else ""
