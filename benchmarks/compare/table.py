"""The table in the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from benchmarks.compare.measure import RAW
from benchmarks.compare.rows import Row
from benchmarks.compare.workload import Workload

__all__ = ["Table", "summary"]

EIGHTHS = " ▏▎▍▌▋▊▉█"
SUMMARY_CELL = 13  # characters of a column
CELLS_PER_RATIO, MOST_CELLS = 4, 24  # of the bars
HEAD = (
    f"  {'':20} {'time':>9} {'ratio':>7}  {'min - max':13} {'':{MOST_CELLS}} "
    f"{'calls':>6} {'over raw':>8} {'syncs':>5}  product"
)


def summary(rows: Sequence[Row]) -> list[list[str]]:
    """Return the ratios as a table: a line for each workload, a column for each peer but raw."""
    peers = list(dict.fromkeys(row.peer for row in rows if row.peer != RAW))
    table = [["", *peers]]
    for workload in dict.fromkeys(row.workload for row in rows):
        here = {row.peer: row for row in rows if row.workload == workload}
        known = {p: row.ratio for p, row in here.items() if p != RAW and row.ratios}
        best = min(known.values(), default=0.0)
        cells = [_cell(here.get(peer), best) for peer in peers]
        table.append([workload, *cells])
    return table


class Table:
    """Shows each workload as soon as it is measured.

    Args:
        stream: Where it goes; with colours if it is a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._colours = stream.isatty()

    def open(self, facts: Mapping[str, Any], rounds: int) -> None:
        """Say what is measured on, and how to read the table."""
        versions = facts["versions"].items()
        known = ", ".join(f"{name} {version}" for name, version in versions if version)
        self._print(f"{facts['processor']}, {facts['cores']} cores, {facts['system']}")
        self._print(f"Python {facts['python']}, torch {facts['torch']}, {known}")
        clock = "processor time" if facts["clock"] == "cpu" else "time"
        self._print(
            f"{rounds} rounds, one peer after the other in each. time: median {clock} of a unit. "
            "ratio: to raw in the\nsame round, median and range; the bar is 1 long where ┊ stands. "
            "calls: Python and C calls for each unit.\nsyncs: reads of device tensors by the host. "
            "product: largest difference from that of raw. ★: best of the frameworks."
        )

    def show(self, workload: Workload, rows: Sequence[Row]) -> None:
        """Show one workload."""
        self._print(f"\n{self._bold(workload.name)}  {workload.about}; time of one {workload.unit}")
        self._print(self._faint(HEAD))
        raw = next(row for row in rows if row.peer == RAW)
        measured = [row for row in rows if row.is_measured and row.ratios]
        others = [row.ratio for row in measured if row.peer != RAW]
        for row in rows:
            if row in measured:
                best = row.peer != RAW and row.ratio == min(others)
                self._print(self._line(row, raw, best))
            else:
                why = row.missing or "FAILED " + _last_line(row.failure)
                self._print(self._red(f"  {row.peer:20} {why}", row.is_wrong, faint=True))

    def close(self, rows: Sequence[Row]) -> None:
        """Sum up: all ratios on one screen, and all that went wrong."""
        self._summarise(rows)
        wrong = [row for row in rows if row.is_wrong]
        for row in wrong:
            text = row.failure or f"product differs by {row.difference:.1e}, over {row.bound:.1e}"
            self._print(self._red(f"\nFAIL {row.workload}, {row.peer}: {text}", True))
        if not wrong:
            self._print("\nAll products are those of raw, within their bounds.")

    def _summarise(self, rows: Sequence[Row]) -> None:
        table = summary(rows)
        self._print(f"\n{self._bold('ratio to raw')}")
        for number, cells in enumerate(table):
            text = "".join(f"{cell[: SUMMARY_CELL - 1]:>{SUMMARY_CELL}}" for cell in cells[1:])
            line = f"  {cells[0]:16}{text}"
            self._print(self._faint(line) if number == 0 else line)

    def _line(self, row: Row, raw: Row, best: bool) -> str:
        over = "" if row.calls is None or raw.calls is None else f"{row.calls - raw.calls:+.0f}"
        calls = "" if row.calls is None else f"{row.calls:.0f}"
        syncs = "" if row.syncs is None else f"{row.syncs:.2g}"
        spread = f"{min(row.ratios):.2f} - {max(row.ratios):.2f}"
        name = self._bold(f"{'★ ' if best else '  '}{row.peer:20}", best)
        product = self._red(_product(row), row.is_wrong)
        return (
            f"{name} {_duration(row.time):>9} {row.ratio:6.2f}x  {spread:13} {_bar(row.ratio)} "
            f"{calls:>6} {over:>8} {syncs:>5}  {product}"
        )

    def _print(self, text: str) -> None:
        print(text.rstrip(), file=self._stream, flush=True)

    def _bold(self, text: str, really: bool = True) -> str:
        return f"\033[1m{text}\033[0m" if self._colours and really else text

    def _faint(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self._colours else text

    def _red(self, text: str, really: bool, *, faint: bool = False) -> str:
        if self._colours and really:
            return f"\033[31m{text}\033[0m"
        return self._faint(text) if faint else text


def _cell(row: Row | None, best: float) -> str:
    if row is None or not row.ratios:
        return "failed" if row is not None and row.failure else "-"
    mark = "★ " if row.ratio == best else ""
    return f"{mark}{row.ratio:.2f}{' !' if row.is_wrong else ''}"


def _bar(ratio: float) -> str:
    """Return a bar whose length is the ratio, with a mark at 1."""
    eighths = min(round(ratio * CELLS_PER_RATIO * 8), MOST_CELLS * 8)
    bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
    bar = f"{bar:{MOST_CELLS}}"
    return bar if eighths > CELLS_PER_RATIO * 8 else _with_mark(bar)


def _with_mark(bar: str) -> str:
    return f"{bar[:CELLS_PER_RATIO]}┊{bar[CELLS_PER_RATIO + 1 :]}"


def _product(row: Row) -> str:
    if row.difference is None:
        return ""
    if row.is_wrong:
        return f"DIFFERS {row.difference:.0e}"
    return "equal" if row.difference == 0 else f"within {row.difference:.0e}"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            value = seconds * factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
