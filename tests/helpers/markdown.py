"""Read the blocks of code and the links of Markdown pages."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Block", "blocks", "commands", "links"]

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)
_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
_TITLE = re.compile(r'title="([^"]+)"')
_ENDS_A_COMMAND = {"&", "&&", "|", "||", ";", ">", "2>", "<"}


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Args:
        language: The first word behind the fence; empty without one.
        title: What `title="..."` says behind it.
        code: What is inside.
        line: The line of the page on which the code begins, from 1.
    """

    language: str
    title: str | None
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in its order."""
    text = page.read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        words = match["info"].split()
        title = _TITLE.search(match["info"])
        indent = re.compile(f"^{match['indent']}", re.MULTILINE)
        found.append(
            Block(
                language=words[0] if words else "",
                title=title[1] if title else None,
                code=indent.sub("", match["code"]),
                line=text.count("\n", 0, match.start("code")) + 1,
            )
        )
    return found


def commands(code: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script, without redirections and comments."""
    for line in code.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in shlex.split(line, comments=True):
            if word in _ENDS_A_COMMAND:
                yield words
                words = []
            else:
                words.append(word)
        yield words


def links(page: Path) -> list[str]:
    """Return the targets of the links of a page, but for those in code and in the web."""
    text = _SPAN.sub("", _FENCE.sub("", page.read_text("utf-8")))
    targets = [match["target"] for match in _LINK.finditer(text)]
    return [target for target in targets if "://" not in target]
