"""Show how far a training is: in a terminal, in a notebook, in a log file."""

import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, TextIO

from torch import Tensor
from tqdm import tqdm
from typing_extensions import override

from trainkit.basics.formatting import clock
from trainkit.basics.signals import in_notebook
from trainkit.callbacks._support.formatting import by_loader
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars, StepResult

__all__ = ["ProgressBar"]

REFRESH_SECONDS = 0.2
FIRST_LINE_SECONDS, LINE_SECONDS = 2.0, 30.0  # in a log file
COLUMNS = 79  # of a line that is to fit everywhere
NEWEST = 0.3  # share of the latest interval in the speed that is shown

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
ENDLESS_BAR = "{desc}: {n_fmt} steps [{elapsed}{postfix}]"
LINE_UP = "\x1b[A"


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
        self._display: _PlainLines | None = None
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
        self._lr: float | None = None  # as of the latest read
        self._speed: float | None = None  # samples/s
        self._evaluated = 0  # batches in the evaluation under way
        self._mark = (time.monotonic(), run.state.samples_seen)
        if run.is_main_process and sys.stderr is not None:  # it was closed from the start
            look = _Terminal if sys.stderr.isatty() else _PlainLines
            self._display = (_Notebook if in_notebook() else look)(sys.stderr)
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
            self._lr = _learning_rate(run)  # after this update the schedule is at its end

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._display is None:
            return
        self._latest = result
        now, is_last = time.monotonic(), run.state.step == run.planned_steps
        is_due = is_last or now >= self._next_refresh
        if is_due if self._is_cpu else is_last or run.is_log_step:
            self._loss = result.loss.item()
            self._lr = self._lr if is_last else _learning_rate(run)
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
        # Bring the speed up to date; evaluations are left out of it.
        since, samples = self._mark
        done = run.state.samples_seen - samples
        if done and now - since >= REFRESH_SECONDS / 2:  # less is too short to measure
            speed = done / (now - since)
            old = speed if self._speed is None else self._speed
            self._speed = old + NEWEST * (speed - old)
            self._mark = (now, run.state.samples_seen)
        batches = [loader.batches_per_epoch for loader in run.evaluation.loaders.values()]
        of = "" if None in batches else f"/{sum(count or 0 for count in batches)}"
        details = [  # narrow terminals leave out the last ones
            f"evaluating {self._evaluated}{of}" if evaluation else None,
            None if self._loss is None else f"loss {self._loss:.4g}",
            None if self._lr is None else f"lr {self._lr:.3g}",
            None if self._speed is None else f"{self._speed:,.0f} samples/s",
            f"{run.state.skipped_steps} skipped" if run.state.skipped_steps else None,
        ]
        progress = {
            "prefix": self._title(run),
            "n": run.state.step,
            "total": run.planned_steps,
            "initial": self._initial,
            "elapsed": now - self._start,
        }
        self._display.show(progress, [text for text in details if text is not None])

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

    def _close(self) -> None:
        self._next_refresh = math.inf
        if self._display is not None:
            self._display.close()
            self._display = None


def _learning_rate(run: Run) -> float:
    rate = run.optimizer.param_groups[0]["lr"]
    return rate.item() if isinstance(rate, Tensor) else float(rate)


def _meter(
    progress: Mapping[str, Any], details: Sequence[str], form: str, columns: int | None = None
) -> str:
    """Return progress as tqdm writes it; without `columns` a bar in it has 10."""
    postfix = ", ".join(details)
    text = tqdm.format_meter(
        **progress, postfix=postfix, bar_format=form, ncols=columns, ascii=" #"
    )
    return str(text)


class _PlainLines:
    """A line now and then, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = FIRST_LINE_SECONDS
        self._waiting: tuple[Mapping[str, Any], Sequence[str]] | None = None

    def show(self, progress: Mapping[str, Any], details: Sequence[str]) -> None:
        """Write progress, unless the last one was written not long ago."""
        self._waiting = progress, details
        if progress["elapsed"] >= self._next and progress["n"] > progress["initial"]:
            self._next = progress["elapsed"] + LINE_SECONDS
            self.close()

    def note(self, text: str) -> None:
        """Write a line that stays, to stdout."""
        print(text, flush=True)

    def close(self) -> None:
        """Leave the last progress standing."""
        if self._waiting is not None:
            print(self._line(*self._waiting), file=self._stream, flush=True)
        self._waiting = None

    def _line(self, progress: Mapping[str, Any], details: Sequence[str]) -> str:
        of = "" if progress["total"] is None else "/{total_fmt}"
        is_between = progress["initial"] < progress["n"] < (progress["total"] or 0)
        left = ", {remaining} left" if is_between else ""
        form = f"{{desc}}, step {{n_fmt}}{of}, {{elapsed}} elapsed{left}{{postfix}}"
        return _meter(progress, details, form)


class _Notebook(_PlainLines):
    """One output of a notebook that each `show` replaces, so that a saved one holds the last."""

    _output: Any = None

    @override
    def show(self, progress: Mapping[str, Any], details: Sequence[str]) -> None:
        from IPython import display

        show: Any = display.display
        line, total = self._line(progress, details), progress["total"]
        bar = f'<progress value="{progress["n"]}" max="{total}"></progress> ' if total else ""
        content = {"text/plain": line, "text/html": f"{bar}<code>{escape(line)}</code>"}
        if self._output is None:
            self._output = show(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)


class _Bar(tqdm):  # type: ignore[misc]  # tqdm says nothing of its types
    monitor_interval = 0  # no thread: who shows progress decides when


_Bar.set_lock(threading.RLock())  # that of tqdm is shared with workers, which may die with it


class _Terminal(_PlainLines):
    """A bar that is drawn again at each `show`, as wide as the terminal; prints come above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        # It has its whole line from `show`. What a terminal says of its rows may be 0.
        self._bar = _Bar(file=stream, disable=False, bar_format="{desc}", ncols=COLUMNS, nrows=20)
        self._above: dict[str, _Above] = {}  # the standard streams that come here
        for name in ("stdout", "stderr"):
            standard = getattr(sys, name)
            if standard is not None and standard.isatty():
                self._above[name] = _Above(standard, self._bar)
                setattr(sys, name, self._above[name])

    @override
    def show(self, progress: Mapping[str, Any], details: Sequence[str]) -> None:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or COLUMNS + 1
        except (AttributeError, OSError, ValueError):  # the console of some editors
            columns = COLUMNS + 1
        self._bar.ncols = columns - 1  # in the last one some begin a new line
        form = ENDLESS_BAR if progress["total"] is None else BAR
        while details and len(_meter(progress, details, form)) > self._bar.ncols:
            details = details[:-1]
        self._bar.set_description_str(_meter(progress, details, form, self._bar.ncols))

    @override
    def note(self, text: str) -> None:
        super().note(text)
        if "stdout" not in self._above:  # a file has it
            _Bar.write(text, file=self._stream)

    @override
    def close(self) -> None:
        for name, above in self._above.items():
            above.flush()
            above.is_above = False
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        self._bar.leave = bool(self._bar.desc)
        self._bar.clear()  # below a bar of somebody else it ends one line higher than it was
        self._bar.close()


class _Above:
    """A standard stream in the terminal of a bar: lines wait until they end, and come above it."""

    def __init__(self, stream: Any, bar: _Bar) -> None:
        self.stream = stream
        self.is_above = True
        self._bar = bar
        self._process = os.getpid()
        self._open = ""  # a line that has not ended
        self._is_drawn = False  # whether a bar of somebody else stands where ours was

    def write(self, text: str) -> int:
        """Write the lines that end here, and what draws itself."""
        is_worker = os.getpid() != self._process  # which has a copy of the bar
        streams = (getattr(getattr(bar, "fp", None), "_wrapped", None) for bar in tqdm._instances)
        # A bar of tqdm that comes here keeps to a line below ours.
        if not self.is_above or is_worker or any(stream is self for stream in streams):
            self.stream.write(text)
        elif "\r" in text or self._is_drawn:
            if not self._is_drawn:
                self._bar.clear()
            self.stream.write(text)
            self._is_drawn = not text.endswith(("\n", LINE_UP))
            if not self._is_drawn:  # it ended one line higher than it was
                self._bar.sp(" " * self._bar.ncols)
                self._bar.refresh()
        else:
            lines, end, self._open = (self._open + text).rpartition("\n")
            if end:
                _Bar.write(lines, file=self.stream)
        return len(text)

    def flush(self) -> None:
        """Write a line that has not ended too, such as a question."""
        if self._open:
            self.write("\n")
        self.stream.flush()

    @override
    def __eq__(self, other: object) -> bool:
        """Return whether it is in the terminal too; so tqdm finds the bars that are in the way."""
        return other is self or bool(getattr(other, "isatty", bool)())

    @override
    def __hash__(self) -> int:
        return hash(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
