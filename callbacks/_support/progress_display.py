"""The two looks of progress: a bar that is redrawn, and plain lines."""

import os
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from trainkit.formatting import clock

__all__ = ["Bar", "PlainLines", "Progress", "choose_display"]

FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 30.0

USUAL_COLUMNS, USUAL_ROWS = 80, 24  # assumed where a terminal claims to have none
WITH_TOTAL = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
)
WITHOUT_TOTAL = "{desc}: {n_fmt} steps [{elapsed}{postfix}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a training is."""

    title: str
    """Such as "epoch 1/3"."""
    step: int
    """Updates applied."""
    details: tuple[str, ...]
    """Values for the right end, the important ones first."""
    total: int | None = None
    """Steps at the end; None where that is not known."""


def _columns(stream: TextIO) -> int:
    """Return the width of a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):  # the console of some editors
        return USUAL_COLUMNS


class Bar:
    """One line that tqdm redraws at each `show`, as wide as its terminal."""

    def __init__(
        self, tqdm: Any, total: int | None, initial: int, stream: TextIO, *, in_terminal: bool
    ) -> None:
        class Quiet(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no thread: whoever calls `show` decides when to draw

        # Rows are given, because some containers give their terminal 0 of them.
        size = {"ncols": USUAL_COLUMNS - 1, "nrows": USUAL_ROWS}
        self._stream = stream
        self._in_terminal = in_terminal
        self._bar = Quiet(
            total=total,
            initial=initial,
            file=stream,
            bar_format=WITHOUT_TOTAL if total is None else WITH_TOTAL,
            **(size if in_terminal else {"dynamic_ncols": True}),
            mininterval=0,
            miniters=0,
            smoothing=0.05,
            delay=1e-9,  # drawn at the first `show`, after what other callbacks print at the start
        )

    def show(self, progress: Progress) -> None:
        """Draw `progress`, with as many of its details as fit."""
        details = progress.details
        if self._in_terminal:
            width = _columns(self._stream) - 1  # in the last column some begin a new line
            self._bar.ncols = width
            while details and self._least_width(progress, details) > width:
                details = details[:-1]
        self._bar.total = progress.total
        self._bar.set_description_str(progress.title, refresh=False)
        self._bar.set_postfix_str(", ".join(details), refresh=False)
        self._bar.update(progress.step - self._bar.n)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Leave the last progress standing."""
        self._bar.close()

    def _least_width(self, progress: Progress, details: tuple[str, ...]) -> int:
        """Return the columns of a line with these details; its bar is then 10 wide."""
        state = {**self._bar.format_dict, "ncols": None, "n": progress.step}
        state |= {"prefix": progress.title, "postfix": ", ".join(details)}
        return len(self._bar.format_meter(**state))


class PlainLines:
    """A line now and then, for files and pipes."""

    def __init__(self, initial: int, stream: TextIO) -> None:
        self._initial = initial
        self._stream = stream
        self._start = time.monotonic()
        self._next = self._start + FIRST_LINE_SECONDS
        self._waiting: Progress | None = None

    def show(self, progress: Progress) -> None:
        """Write `progress`, unless the last one was written not long ago."""
        self._waiting = progress
        now = time.monotonic()
        if now >= self._next and progress.step > self._initial:
            self._next = now + LINE_SECONDS
            self._write(progress, now)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Write the last progress, if it was not written yet."""
        if self._waiting is not None:
            self._write(self._waiting, time.monotonic())

    def _write(self, progress: Progress, now: float) -> None:
        elapsed = now - self._start
        self._waiting = None
        texts = [progress.title, f"step {progress.step}", f"{clock(elapsed)} elapsed"]
        if progress.total is not None:
            done, left = progress.step - self._initial, progress.total - progress.step
            texts[1] += f"/{progress.total}"
            if done and left:
                texts.append(f"{clock(elapsed / done * left)} left")
        self.note(", ".join([*texts, *progress.details]))


def choose_display(*, total: int | None, initial: int, stream: TextIO) -> Bar | PlainLines:
    """Return a bar in terminals and notebooks, plain lines elsewhere.

    Args:
        total: Steps at the end; None where that is not known.
        initial: Steps done before.
        stream: Where to write; a notebook has its own place.
    """
    if _in_notebook():
        from tqdm.auto import tqdm  # draws with widgets

        return Bar(tqdm, total, initial, sys.stdout, in_terminal=False)
    if stream.isatty():
        from tqdm import tqdm

        return Bar(tqdm, total, initial, stream, in_terminal=True)
    return PlainLines(initial, stream)


def _in_notebook() -> bool:
    """Return whether a notebook's kernel runs this code; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
