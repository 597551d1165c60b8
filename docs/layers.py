"""Draws the rooms of trainkit and who imports whom: `python docs/layers.py` writes layers.svg.

A room is a folder of `trainkit/`, or a file beside them. Rooms stand on the floor that their
imports allow, the lowest first; a line goes from a room to each one that it imports and that no
other room between them imports for it.
"""

import ast
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "layers.svg"

WIDTH, FLOOR, BOX, HIGH = 900, 74, 112, 34


def imports() -> dict[str, set[str]]:
    """Return which rooms each room imports."""
    rooms: dict[str, set[str]] = {}
    for path in sorted([*(ROOT / "trainkit").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]):
        room = _room(path)
        if room:
            rooms.setdefault(room, set()).update(_imported(path))
    return {room: (seen & rooms.keys()) - {room} for room, seen in rooms.items()}


def floors(rooms: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms by floor: each stands above all that it imports."""
    level: dict[str, int] = {}
    while len(level) < len(rooms):
        for room, seen in rooms.items():
            if seen <= level.keys():
                level.setdefault(room, max((level[other] + 1 for other in seen), default=0))
    return [sorted(r for r in level if level[r] == n) for n in range(max(level.values()) + 1)]


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "callbacks" else parts[1].removeprefix("__init__")


def _imported(path: Path) -> Iterator[str]:
    """Yield the rooms that a file imports, but for what only type checkers see."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainkit"):
            parts = (node.module or "").split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]


def _direct(rooms: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Yield who imports whom, but for what follows from other imports."""
    above: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in above:
            above[room] = rooms[room].union(*(reach(other) for other in rooms[room]))
        return above[room]

    for room, seen in rooms.items():
        for other in seen:
            if not any(other in reach(between) for between in seen):
                yield room, other


def draw() -> str:
    """Return the picture as SVG."""
    rooms = imports()
    rows = floors(rooms)
    place = {
        room: (WIDTH * (2 * i + 1) / (2 * len(row)), FLOOR * (len(rows) - 1 - n) + HIGH)
        for n, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {FLOOR * len(rows)}" '
        'font-family="sans-serif" font-size="14" text-anchor="middle">',
        "<title>Each room of trainkit imports only rooms below it</title>",
        f'<rect width="{WIDTH}" height="{FLOOR * len(rows)}" fill="white"/>',
    ]
    for room, other in sorted(_direct(rooms)):
        (x, y), (to_x, to_y) = place[room], place[other]
        lines.append(
            f'<path d="M{x:.0f} {y + HIGH / 2:.0f}C{x:.0f} {y + FLOOR:.0f} {to_x:.0f} '
            f'{to_y - FLOOR:.0f} {to_x:.0f} {to_y - HIGH / 2:.0f}" fill="none" stroke="#9ab"/>'
        )
    for room, (x, y) in place.items():
        lines.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - HIGH / 2:.0f}" width="{BOX}" height="{HIGH}" '
            f'rx="6" fill="#eef4fb" stroke="#357"/><text x="{x:.0f}" y="{y + 5:.0f}">'
            f"{escape(room)}</text>"
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
