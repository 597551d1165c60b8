"""Writes docs/accelerate-differences.toml into its page: `python docs/differences.py`."""

import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
TABLE = DOCS / "accelerate-differences.toml"
PAGE = DOCS / "migrating-from-accelerate.md"
BEGIN = "<!-- What follows is written by docs/differences.py. -->\n"

HEAD = """
What stands behind **Write** is to be written instead; where nothing does, the script stays.

## Where Accelerate has a bug

| Accelerate | trainkit |
|---|---|
"""


def differences() -> list[dict[str, Any]]:
    """Return the table."""
    found: list[dict[str, Any]] = tomllib.loads(TABLE.read_text("utf-8"))["difference"]
    return found


def written() -> str:
    """Return the page, of which what stands before `BEGIN` stays."""
    before = PAGE.read_text("utf-8").partition(BEGIN)[0]
    return f"{before}{BEGIN}{''.join(_sections(differences()))}"


def _sections(table: list[dict[str, Any]]) -> Iterator[str]:
    yield HEAD
    yield from (f"| {row['theirs']} | {_said(row)} |\n" for row in table if row["where"] == "bugs")
    yield "\n## Other differences\n"
    for place in dict.fromkeys(row["where"] for row in table if row["where"] != "bugs"):
        yield f"\n{place}\n\n"
        for row in table:
            if row["where"] == place:
                yield textwrap.fill(
                    _said(row),
                    100,
                    initial_indent="- ",
                    subsequent_indent="  ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                yield "\n"


def _said(row: dict[str, Any]) -> str:
    return f"{row['ours']} **Write** {row['write']}." if "write" in row else row["ours"]


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
