"""Runs the rows of one framework, each in a process that is ended with all it has started."""

import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.behaviour import rows
from benchmarks.behaviour.bench import ERROR, Bench, Outcome, in_short
from benchmarks.behaviour.frameworks import load
from benchmarks.behaviour.job import Framework, NotOffered, Variant
from benchmarks.behaviour.rows import Row
from tests.helpers.ranks import RanksError

CELL_LIMIT = 600.0  # seconds for one cell with all its variants
RIGHT, OPTION, WRONG, NOT_OFFERED = "right", "option", "wrong", "not offered"


@dataclass(frozen=True)
class Cell:
    """What a run said.

    Attributes:
        mark: "right", "option" (right where a switch is set), "wrong", "not offered", "raises" (an
            exception) or "error" (it does not end, or it crashes).
        figure: What was seen by default.
        option: The switch that makes it right.
        tried: Switches that do not, and what was seen with each.
    """

    row: str
    framework: str
    mark: str
    figure: str = ""
    option: str = ""
    tried: str = ""
    seconds: float = 0.0


def _probe(framework: Framework, row: Row, variant: Variant | None) -> tuple[str, str]:
    """Return a mark and a figure."""
    with tempfile.TemporaryDirectory(prefix="behaviour-") as folder:
        try:
            outcome: Outcome = row.probe(Bench(framework, variant, Path(folder)))
        except NotOffered as reason:
            return NOT_OFFERED, str(reason)
        except RanksError as error:
            return in_short(error)
        except Exception as error:
            return ERROR, f"{type(error).__name__}: {error}"[:160]
    return (RIGHT if outcome.right else WRONG), outcome.figure


def fill(framework: Framework, row: Row) -> Cell:
    """Return what `framework` does, and with which switch it does what is right."""
    if row.key in framework.not_offered:
        return Cell(row.key, framework.key, NOT_OFFERED, framework.not_offered[row.key])
    mark, figure = _probe(framework, row, None)
    if mark in (RIGHT, NOT_OFFERED):
        return Cell(row.key, framework.key, mark, figure)
    tried: list[str] = []
    for variant in framework.variants.get(row.key, []):
        other, seen = _probe(framework, row, variant)
        if other == RIGHT:
            return Cell(row.key, framework.key, OPTION, figure, variant.label, "; ".join(tried))
        tried.append(f"{variant.label}: {seen}")
    if row.key in framework.left_to_users:
        figure = f"{framework.left_to_users[row.key]}: {figure}"
        return Cell(row.key, framework.key, NOT_OFFERED, figure)
    return Cell(row.key, framework.key, mark, figure, tried="; ".join(tried))


def _be(framework: Framework, row: Row, answer: Connection) -> None:
    os.setsid()
    with open(os.devnull, "w") as nothing:
        if "BEHAVIOUR_LOUD" not in os.environ:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
    answer.send(fill(framework, row))


def run(framework: Framework, row: Row) -> Cell:
    """Fill a cell in a process of its own; end it, and all that it has started, in time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_be, args=(framework, row, theirs))
    begin, others = time.monotonic(), {*psutil.Process().children(recursive=True)}
    process.start()
    theirs.close()
    try:
        found: Cell = ours.recv() if ours.poll(CELL_LIMIT) else _no_end(framework, row)
    except EOFError:
        found = Cell(row.key, framework.key, ERROR, "the probe died")
    for left in psutil.Process().children(recursive=True):
        if left not in others:
            left.kill()
    process.join()
    return Cell(**(asdict(found) | {"seconds": round(time.monotonic() - begin, 1)}))


def _no_end(framework: Framework, row: Row) -> Cell:
    return Cell(row.key, framework.key, ERROR, f"no answer in {CELL_LIMIT:.0f} s")


def main() -> None:
    """Fill the cells named on the command line, one line of JSON for each."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans come to us
    framework, known = load(sys.argv[1]), rows.load()
    print(json.dumps({"version": version(framework.package)}), flush=True)
    for key in sys.argv[2:]:
        print(json.dumps(asdict(run(framework, known[key]))), flush=True)


if __name__ == "__main__":
    main()
