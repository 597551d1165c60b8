"""The two looks of progress: a bar that is redrawn, and plain lines."""

import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TextIO

from typing_extensions import override

from trainkit.callbacks.texts import duration

__all__ = ["Display", "Progress", "choose_display"]

FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 30.0

UNKNOWN_SIZE = {"ncols": 80, "nrows": 24}  # assumed where a terminal says that it has none

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
    details: str
    """Figures for the right end."""


class Display(ABC):
    """Shows progress to a person."""

    @abstractmethod
    def show(self, progress: Progress) -> None:
        """Show `progress`, or leave it out if the last one was shown not long ago."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Write a line that stays."""

    @abstractmethod
    def close(self) -> None:
        """Leave the last progress standing; nothing may follow."""


def choose_display(*, total: int | None, initial: int, stream: TextIO) -> Display:
    """Return a bar in terminals and notebooks, plain lines elsewhere.

    Args:
        total: Steps at the end; None where that is not known.
        initial: Steps done before.
        stream: Where to write; a notebook has its own place.
    """
    if _in_notebook():
        from tqdm.auto import tqdm  # draws with widgets

        return _Bar(tqdm, total, initial, sys.stdout)
    if stream.isatty():
        from tqdm import tqdm

        return _Bar(tqdm, total, initial, stream)
    return _Lines(total, initial, stream)


def _in_notebook() -> bool:
    """Return whether a notebook's kernel runs this code; imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _size(stream: TextIO) -> dict[str, Any]:
    """Return what tells tqdm the size; some containers give their terminal 0 columns."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a notebook
        columns = 1
    return {"dynamic_ncols": True} if columns else UNKNOWN_SIZE


class _Bar(Display):
    """One line that tqdm redraws at each `show`."""

    def __init__(self, tqdm: Any, total: int | None, initial: int, stream: TextIO) -> None:
        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no thread: whoever calls `show` decides when to draw

        self._stream = stream
        self._bar = Bar(
            total=total,
            initial=initial,
            file=stream,
            bar_format=WITHOUT_TOTAL if total is None else WITH_TOTAL,
            **_size(stream),
            mininterval=0,
            miniters=0,
            smoothing=0.05,
            delay=1e-9,  # drawn at the first `show`, after what other callbacks print at the start
        )

    @override
    def show(self, progress: Progress) -> None:
        self._bar.set_description_str(progress.title, refresh=False)
        self._bar.set_postfix_str(progress.details, refresh=False)
        self._bar.update(progress.step - self._bar.n)

    @override
    def note(self, text: str) -> None:
        self._bar.write(text, file=self._stream)

    @override
    def close(self) -> None:
        self._bar.close()


class _Lines(Display):
    """A line now and then, for files and pipes."""

    def __init__(self, total: int | None, initial: int, stream: TextIO) -> None:
        self._total = total
        self._initial = initial
        self._stream = stream
        self._start = time.monotonic()
        self._next = self._start + FIRST_LINE_SECONDS
        self._waiting: Progress | None = None

    @override
    def show(self, progress: Progress) -> None:
        self._waiting = progress
        now = time.monotonic()
        if now >= self._next and progress.step > self._initial:
            self._next = now + LINE_SECONDS
            self._write(progress, now)

    @override
    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    @override
    def close(self) -> None:
        if self._waiting is not None:
            self._write(self._waiting, time.monotonic())

    def _write(self, progress: Progress, now: float) -> None:
        elapsed = now - self._start
        self._waiting = None
        texts = [progress.title, f"step {progress.step}", f"{duration(elapsed)} elapsed"]
        if self._total is not None:
            done, left = progress.step - self._initial, self._total - progress.step
            texts[1] += f"/{self._total}"
            if done and left:
                texts.append(f"{duration(elapsed / done * left)} left")
        texts.append(progress.details)
        self.note(", ".join(text for text in texts if text))
