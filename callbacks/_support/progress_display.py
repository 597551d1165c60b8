"""The looks of progress: a bar that is redrawn, in a terminal or a notebook, and plain lines."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any, TextIO, TypeAlias

from typing_extensions import override

from trainkit.basics.formatting import clock
from trainkit.basics.signals import in_notebook

__all__ = ["Display", "Progress", "choose_display"]

FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 30.0

USUAL_COLUMNS = 80  # assumed where a terminal claims to have none
LEAST_BAR = 10  # columns; before it gets narrower, details are left out


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
    initial: int
    """Steps that were done before."""
    seconds: float
    """Since it began."""

    @property
    def left(self) -> str | None:
        """The time until the end; None where it is not known."""
        done = self.step - self.initial
        if self.total is None or not (done or self.step >= self.total):
            return None
        return clock(self.seconds / (done or 1) * max(0, self.total - self.step))

    def bar(self, columns: int) -> str:
        """Return it as a line of so many columns, with as many of its details as fit."""
        details, known = list(self.details), self.total is not None
        while True:
            times = f"{clock(self.seconds)}<{self.left or '?'}" if known else clock(self.seconds)
            count = f"| {self.step}/{self.total}" if known else f"{self.step} steps"
            end = f"{count} [{', '.join([times, *details])}]"
            if self.total is None:
                line, room = f"{self.title}: {end}", columns
            else:
                share = min(1.0, self.step / max(1, self.total))
                start = f"{self.title}: {share:4.0%}|"
                room = columns - len(start) - len(end)
                line = start + ("#" * int(share * room)).ljust(room) + end
            if not details or (len(line) <= columns and room >= LEAST_BAR):
                return line[:columns]
            details.pop()

    @override
    def __str__(self) -> str:
        """Return all of it as text."""
        most = "" if self.total is None else f"/{self.total}"
        left = [f"{self.left} left"] if self.left and self.step != self.total else []
        texts = [self.title, f"step {self.step}{most}", f"{clock(self.seconds)} elapsed", *left]
        return ", ".join([*texts, *self.details])


class _Bar:
    """One line of a terminal that is drawn again at each `show`; what is printed comes above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._line = ""  # what is drawn
        self._is_after_text = False  # whether a line that has not ended is above it
        self._above: dict[str, _Above] = {}  # the standard streams that come here
        for name in ("stdout", "stderr"):
            standard = getattr(sys, name)
            if standard is not None and standard.isatty():
                self._above[name] = _Above(standard, self.write_above)
                setattr(sys, name, self._above[name])

    def show(self, progress: Progress) -> None:
        """Draw `progress` as wide as the terminal."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or USUAL_COLUMNS
        except (AttributeError, OSError, ValueError):  # the console of some editors
            columns = USUAL_COLUMNS
        # In the last column some begin a new line.
        self._draw(progress.bar(columns - 1))

    def note(self, text: str) -> None:
        """Write a line that stays: to stdout, and where that is a file, here too."""
        print(text, flush=True)
        if "stdout" not in self._above:
            self.write_above(self._stream, f"{text}\n")

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write lines to the terminal where the bar is, and draw it below; or a part of a line."""
        line = self._line
        self._draw("")
        stream.write(text)
        stream.flush()
        if text.endswith("\n"):
            self._draw(line)
        else:
            self._is_after_text = "\r" not in text  # else it is a bar of somebody else

    def close(self) -> None:
        """Leave the last progress standing."""
        for name, above in self._above.items():
            above.flush()
            above.is_above = False
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        if self._line:
            print(file=self._stream, flush=True)

    def _draw(self, line: str) -> None:
        if self._line or line:
            start, self._is_after_text = "\n" if self._is_after_text else "\r", False
            blank = " " * (len(self._line) - len(line))
            self._stream.write(f"{start}{line}{blank}" + ("" if line else "\r"))
            self._stream.flush()
        self._line = line


class _Above:
    """A standard stream in the terminal of a bar: lines wait until they end, and come above it."""

    def __init__(self, stream: Any, write_above: Callable[[Any, str], None]) -> None:
        self.stream = stream
        self.is_above = True
        self._write_above = write_above
        self._process = os.getpid()
        self._open = ""  # a line that has not ended

    def write(self, text: str) -> int:
        """Write the lines that end here, and what draws itself."""
        if not self.is_above or os.getpid() != self._process:
            self.stream.write(text)  # a worker has only a copy of the bar
            return len(text)
        lines, end, self._open = (self._open + text).rpartition("\n")
        if "\r" in self._open:
            lines, end, self._open = lines + end, self._open, ""
        if end:
            self._write_above(self.stream, lines + end)
        return len(text)

    def flush(self) -> None:
        """Write a line that has not ended too, such as a question; the bar comes back later."""
        text, self._open = self._open, ""
        if text:
            self._write_above(self.stream, text)
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Notebook:
    """One output of a notebook that each `show` replaces, so that a saved one holds the last."""

    def __init__(self) -> None:
        self._output: Any = None

    def show(self, progress: Progress) -> None:
        """Draw `progress`."""
        from IPython import display

        show: Any = display.display
        bar = f'<progress value="{progress.step}" max="{progress.total or 1}"></progress> '
        html = (bar if progress.total else "") + f"<code>{escape(str(progress))}</code>"
        content = {"text/plain": str(progress), "text/html": html}
        if self._output is None:
            self._output = show(content, raw=True, display_id=True)
        else:
            self._output.update(content, raw=True)

    def note(self, text: str) -> None:
        """Write a line that stays."""
        print(text, flush=True)

    def close(self) -> None:
        """Leave the last progress standing."""


class _PlainLines:
    """A line now and then, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = FIRST_LINE_SECONDS
        self._waiting: Progress | None = None

    def show(self, progress: Progress) -> None:
        """Write `progress`, unless the last one was written not long ago."""
        self._waiting = progress
        if progress.seconds >= self._next and progress.step > progress.initial:
            self._next = progress.seconds + LINE_SECONDS
            self.close()

    def note(self, text: str) -> None:
        """Write a line that stays, to stdout."""
        print(text, flush=True)

    def close(self) -> None:
        """Write the last progress, if it was not written yet."""
        if self._waiting is not None:
            print(self._waiting, file=self._stream, flush=True)
        self._waiting = None


Display: TypeAlias = _Bar | _Notebook | _PlainLines


def choose_display(stream: TextIO) -> Display:
    """Return a bar in terminals and notebooks, which have their own place, else plain lines."""
    if in_notebook():
        return _Notebook()
    return _Bar(stream) if stream.isatty() else _PlainLines(stream)
