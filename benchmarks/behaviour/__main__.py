"""Fills the table: `python -m benchmarks.behaviour [-o table.md]`, in the root of the repository.

It exits with 1 where trainkit is wrong.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.behaviour import table
from benchmarks.behaviour.frameworks import NAMES, installed
from benchmarks.behaviour.rows import load as load_rows
from benchmarks.behaviour.worker import ERROR, RIGHT, Cell

Taken = Callable[[str, dict[str, Any]], None]


class Results:
    """The cells so far, in a file if there is one: a run that was ended goes on where it was."""

    def __init__(self, path: Path | None, *, afresh: bool) -> None:
        self.path, self._lock = path, Lock()
        self.versions: dict[str, str] = {}
        self.cells: dict[tuple[str, str], Cell] = {}
        if path is not None and path.exists() and not afresh:
            earlier = json.loads(path.read_text())
            self.versions = earlier["versions"]
            self.cells = {(c["row"], c["framework"]): Cell(**c) for c in earlier["cells"]}

    def has(self, row: str, framework: str) -> bool:
        """Whether a cell is filled; one that did not end is run again, as load can do that."""
        cell = self.cells.get((row, framework))
        return cell is not None and cell.mark != ERROR

    def take(self, framework: str, found: dict[str, Any]) -> None:
        """Take one line of a worker."""
        with self._lock:
            if "version" in found:
                self.versions[framework] = found["version"]
            else:
                cell = Cell(**found)
                self.cells[cell.row, framework] = cell
                print(f"{framework} {cell.row}: {cell.mark}, {cell.figure}", file=sys.stderr)
            if self.path is not None:
                cells = [asdict(cell) for cell in self.cells.values()]
                text = json.dumps({"versions": self.versions, "cells": cells}, indent=1)
                self.path.write_text(text + "\n")


def _run(framework: str, rows: list[str], take: Taken) -> None:
    """Fill these cells of a framework."""
    command = [sys.executable, "-m", "benchmarks.behaviour.worker", framework, *rows]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                take(framework, json.loads(line))
            except ValueError:  # what a framework prints
                continue
    if process.returncode:
        print(f"{framework}: the worker ended with {process.returncode}", file=sys.stderr)


def _arguments(rows: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.behaviour", description=__doc__)
    parser.add_argument("--frameworks", nargs="+", choices=NAMES, default=installed())
    parser.add_argument("--rows", nargs="+", choices=rows, default=rows, metavar="ROW")
    parser.add_argument("--jobs", type=int, default=2, help="frameworks at the same time")
    parser.add_argument("-o", "--output", type=Path, help="the document, not to the terminal")
    parser.add_argument("--compact", type=Path, help="the small table alone")
    parser.add_argument("--json", type=Path, help="all cells; those that are in it are not run")
    parser.add_argument("--afresh", action="store_true", help="forget what is in --json")
    return parser.parse_args()


def main() -> int:
    """Run what is asked for, write it, and say whether trainkit is right."""
    rows = load_rows()
    arguments = _arguments(list(rows))
    results = Results(arguments.json, afresh=arguments.afresh)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for key in arguments.frameworks:
            missing = [row for row in arguments.rows if not results.has(row, key)]
            if missing:
                pool.submit(partial(_run, key, missing, results.take))
    chosen = [row for row in rows.values() if any(row.key == key for key, _ in results.cells)]
    names = {key: heading for key, (heading, *_) in NAMES.items() if key in results.versions}
    command = "python -m benchmarks.behaviour"
    document = table.full(chosen, names, results.versions, results.cells, command)
    if arguments.output is None:
        print(document)
    else:
        arguments.output.write_text(document)
    if arguments.compact is not None:
        arguments.compact.write_text(table.compact(chosen, names, results.cells))
    ours = [cell for cell in results.cells.values() if cell.framework == "trainkit"]
    return int(any(cell.mark != RIGHT for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
