"""Writes the cells as tables in Markdown: a small one of marks, and one with what was seen."""

import platform
from collections.abc import Iterable, Mapping
from datetime import date

from benchmarks.behaviour.bench import ERROR, RAISES
from benchmarks.behaviour.rows import Row
from benchmarks.behaviour.worker import NOT_OFFERED, OPTION, RIGHT, WRONG, Cell

MARKS = {
    RIGHT: "yes",
    OPTION: "option",
    WRONG: "**no**",
    RAISES: "raises",
    ERROR: "**fails**",
    NOT_OFFERED: "-",
}
LEGEND = (
    "yes: right as it comes. option: wrong as it comes, right with a switch. **no**: wrong. "
    "raises: refuses with an exception. **fails**: crashes or does not end. -: not offered."
)
Cells = Mapping[tuple[str, str], Cell]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def compact(rows: Iterable[Row], names: Mapping[str, str], cells: Cells) -> str:
    """Return a table of marks.

    Args:
        rows: In their order.
        names: Of the frameworks, by their keys, in the order of the columns.
        cells: By row and framework.
    """
    lines = [_line(["", *names.values()]), _line(["---", *["---"] * len(names)])]
    for row in rows:
        found = [cells.get((row.key, key)) for key in names]
        lines.append(_line([row.title, *(MARKS[c.mark] if c else "" for c in found)]))
    return "\n".join([*lines, "", LEGEND, ""])


def _seen(cell: Cell) -> str:
    text = f"{MARKS[cell.mark]}: {cell.figure}" if cell.figure else MARKS[cell.mark]
    if cell.option:
        text += f"; right with `{cell.option}`"
    return text + (f" ({cell.tried})" if cell.tried and not cell.option else "")


def full(
    rows: Iterable[Row],
    names: Mapping[str, str],
    versions: Mapping[str, str],
    cells: Cells,
    command: str,
) -> str:
    """Return a document with both tables; `versions` are those of the frameworks, by their keys."""
    import torch

    chosen = list(rows)
    columns = {key: f"{name} {versions[key]}" for key, name in names.items()}
    parts = [
        "# Behaviour of trainkit and of others",
        f"Made by `{command}` on {date.today()} with torch {torch.__version__} and Python "
        f"{platform.python_version()}, on CPUs. Every cell comes from a run; "
        "`--frameworks` and `--rows` run a part of it again. The probes are in "
        "`benchmarks/behaviour/rows`, how each framework is used in "
        "`benchmarks/behaviour/frameworks`.",
        compact(chosen, columns, cells).rstrip(),
    ]
    for row in chosen:
        parts += [f"## {row.title}", f"`{row.key}`. {row.how} Right: {row.right}."]
        lines = [_line(["framework", "seen"]), _line(["---", "---"])]
        for key, name in names.items():
            if (row.key, key) in cells:
                lines.append(_line([name, _seen(cells[row.key, key])]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
