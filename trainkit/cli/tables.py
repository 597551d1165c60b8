"""Columns of text."""

from collections.abc import Iterable, Sequence

__all__ = ["print_table"]


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under titles, each column as wide as it needs; a column of numbers is right."""
    cells = [[_plain(cell) for cell in row] for row in rows]
    columns = list(zip(titles, *cells, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    numeric = [bool(cells) and all(_is_number(cell) for cell in column[1:]) for column in columns]
    for row in ([*titles], *cells):
        parts = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, numeric, strict=True)
        ]
        print("  ".join(parts).rstrip())


def _plain(cell: object) -> str:
    """Return a cell on one line; what a terminal would obey is shown, not sent."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(cell))


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() and cell.rstrip(" kMGTB").replace(".", "", 1).isdigit()
