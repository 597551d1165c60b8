"""What commands print: tables and text that fit the terminal, and nothing that it would obey."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from trainkit.basics.formatting import visible

_INDENT = 2


class _Visible:
    """A stream to which what a terminal would obey is written so that it is seen."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write; names in files of other people may hold anything."""
        self._stream.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def visibly() -> Iterator[None]:
    """Let `print` show what a terminal would obey, such as the escape sequences of a name."""
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is not None:
                stack.enter_context(redirect(_Visible(stream)))
        yield


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under titles, each column as wide as it needs; a column of numbers is right.

    Columns that the terminal has no room for go on in lines of their own below, and no value is
    torn unless it is wider than the terminal.
    """
    # Each on one line; what a terminal would obey is shown, not sent.
    cells = [
        [visible(str(cell)).replace("\n", r"\n").replace("\t", r"\t") for cell in row]
        for row in rows
    ]
    columns = list(zip(titles, *cells, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    numeric = [bool(cells) and all(_is_number(cell) for cell in column[1:]) for column in columns]
    most = _terminal_columns()
    lines, taken = [[0]], widths[0]  # the columns of each line
    for index, width in enumerate(widths[1:], 1):
        taken += 2 + width
        if taken > most:
            lines.append([])
            taken = _INDENT + width
        lines[-1].append(index)
    for row in ([*titles], *cells):
        for number, line in enumerate(lines):
            parts = (f"{row[i]:{'>' if numeric[i] else '<'}{widths[i]}}" for i in line)
            if text := "  ".join(parts).rstrip():
                print_text([" " * _INDENT * (number > 0) + text])


def print_text(lines: Iterable[str]) -> None:
    """Print lines, in a terminal broken between words; what is indented stays so."""
    most = _terminal_columns()
    for line in lines:
        if len(line) <= most:
            print(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + _INDENT)
        wrapped = textwrap.wrap(
            line, most, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        print("\n".join(wrapped))


def _terminal_columns() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() and cell.rstrip(" kMGTB").replace(".", "", 1).isdigit()
