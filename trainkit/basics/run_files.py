"""Reads what runs wrote, whatever it holds: what cannot be read is named once, the rest is shown.

A killed process, a full disk, a power cut and people's editors leave anything in the folder of a
run. All that reads lines there reads them here, in constant memory.
"""

import json
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from trainkit.basics.systems import AT_ONCE

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What an attempt to use a value of another kind raises."""

_LONGEST = 1 << 24  # bytes of a line
_DEEPEST = 100  # objects inside of each other; those who walk through them recurse
_BLOCK = 1 << 12  # bytes that are looked through at once for the end of a line

T = TypeVar("T")

_decoder = json.JSONDecoder()


class LeftOut(UserWarning):
    """Something in the folder of a run could not be read, and is not shown."""


def parsed(path: Path, parse: Callable[[bytes], T]) -> Iterator[T | None]:
    """Yield what `parse` makes of each line of a file, and None for what it refuses.

    At the end a warning names the first line that was refused, and how many others were; or why
    the file cannot be read. Half a line at the end, of a process that was killed or is at work, is
    left out.
    """
    refused, first = 0, ""
    try:
        for number, line in enumerate(lines(path), 1):
            if not line.strip():
                continue
            try:
                record = parse(line)
            except MALFORMED as error:
                first = first or f"line {number} was left out ({error})"
                refused += 1
                yield None
            else:
                yield record
    except OSError as error:
        first = f"it was left out ({error.strerror or error})"
    if first:
        more = f", and {refused - 1} more" if refused > 1 else ""
        warnings.warn(f"`{path}`: {first}{more}.", LeftOut, stacklevel=2)


def stretches(path: Path, parse: Callable[[bytes], T], limit: int) -> Iterator[list[T | None]]:
    """Yield what `parsed` does in lists that are equally long, at most so many."""
    try:
        with _opened(path) as file:
            size = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        size = 0  # `parsed` says why
    records = parsed(path, parse)
    while stretch := list(islice(records, max(1, -(-size // limit)))):
        yield stretch


def whole_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file is; a warning says why it is empty where it is none."""
    try:
        with _opened(path) as file:
            return json_object(file.read(_LONGEST))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        warnings.warn(f"`{path}`: it was left out ({why}).", LeftOut, stacklevel=2)
        return {}


def json_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object that a line is.

    Raises:
        ValueError: It is none, or nested too deep.
    """
    try:
        text = line.decode().strip()
        parsed, end = _decoder.raw_decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError:
        raise ValueError("no JSON") from None
    if end < len(text):
        raise ValueError("no JSON")
    if not isinstance(parsed, dict):
        raise ValueError("no JSON object")
    if line.count(b"{") + line.count(b"[") > _DEEPEST and _depth(parsed) > _DEEPEST:
        raise ValueError("nested too deep")
    return parsed


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
    return depth


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a file; of one that is too long its begin.

    Raises:
        OSError: It is no ordinary file, or cannot be read.
    """
    with _opened(path) as file:
        while line := file.readline(_LONGEST):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST)
            if rest:
                yield line.removesuffix(b"\n")


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield where the complete lines of a file begin, and what they are, the last one first.

    Raises:
        OSError: It is no ordinary file, or cannot be read.
    """
    with _opened(path) as file:
        end = _line_start(file, file.seek(0, os.SEEK_END))
        while end > 0:
            start = _line_start(file, end - 1)
            file.seek(start)
            yield start, file.read(min(end - 1 - start, _LONGEST))
            end = start


def last_object(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the last line of a file that is a JSON object begins, and the object.

    Raises:
        LookupError: There is none.
        OSError: It is no ordinary file, or cannot be read.
    """
    for start, line in lines_from_end(path):
        with suppress(ValueError):
            return start, json_object(line)
    raise LookupError("no line that can be read")


def object_at(path: Path, start: int, kind: str) -> dict[str, Any]:
    """Return the JSON object of a `kind` in the line of a file that begins at a byte.

    Raises:
        Exception: One of `MALFORMED`: there is none.
        OSError: It is no ordinary file, or cannot be read.
    """
    with _opened(path) as file:
        file.seek(start)
        record = json_object(file.readline(_LONGEST))
    if record["kind"] != kind:
        raise ValueError(f"no {kind}")
    return record


def complete_size(path: Path) -> int:
    """Return the bytes of a file up to the end of its last complete line."""
    with _opened(path) as file:
        return _line_start(file, file.seek(0, os.SEEK_END))


def drop_half_line(path: Path) -> None:
    """Take away half a line at the end of a file, which a killed process left."""
    size = complete_size(path)
    if size < path.stat().st_size:
        os.truncate(path, size)


def _line_start(file: BinaryIO, end: int) -> int:
    """Return where the line begins that holds the byte before `end`, or begins there."""
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open an ordinary file; a pipe would make the reader wait, and a device may have no end."""

    def at_once(name: str, flags: int) -> int:
        return os.open(name, flags | AT_ONCE)

    with open(path, "rb", opener=at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("no ordinary file")
        yield file
