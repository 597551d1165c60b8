"""Values as lines of a file: JSON or CSV."""

import csv
import io
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics.formatting import json_value
from trainkit.basics.outputs import absolute
from trainkit.basics.run_files import (
    MALFORMED,
    complete_size,
    drop_half_line,
    json_object,
    lines,
    lines_from_end,
)
from trainkit.basics.written_files import Lines, giving_up, replace_file
from trainkit.errors import ConfigError
from trainkit.trackers.tracker import GeneralTracker, has_one


class FileTracker(GeneralTracker, ABC):
    """Writes what is logged at a time as a line of `<logging_dir>/<run_name>/<file_name>`.

    Values that are not finite are the texts "NaN", "Infinity" and "-Infinity". Settings go into
    `metrics.hparams.json` beside it.

    Args:
        run_name: Name of the run.
        logging_dir: Folder of all runs.
        file_name: Of the file; by default `metrics.jsonl` or `metrics.csv`.
    """

    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path, file_name: str = "") -> None:
        super().__init__()
        folder = absolute(logging_dir, "logging_dir") / run_name
        self.path = self.place = folder / (file_name or f"metrics.{self.name}")
        self.tracker: Lines | None = None
        self._start = time.monotonic()

    @override
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            drop_half_line(self.path)
        self.tracker = Lines(self.path, self._called)

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(json_value(values), indent=1) + "\n"
        self.path.with_name(f"{self.path.stem}.hparams.json").write_text(text, encoding="utf-8")

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self.tracker is None:
            raise ConfigError("The tracker has ended. Log before `end_training`.")
        scalars = {name: v.item() if has_one(v) else v for name, v in values.items()}
        seconds = round(time.monotonic() - self._start, 3)
        line = self._line(json_value({"step": step, **scalars, "time/seconds": seconds}))
        self.tracker.write(line)

    @override
    def finish(self) -> None:
        if self.tracker is not None:
            self.tracker.close()
            self.tracker = None

    def cut(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Take away the entries behind the last one that is wanted, before `start`.

        Lines that are no entries stay where they are before it. Returns False, and leaves the file
        as it is, where it holds no entry at all.

        Args:
            is_wanted: Says it of the values of an entry; by an error of Python, that they are none.
        """
        end = None
        for start, line in lines_from_end(self.path):
            try:
                if is_wanted(self._values(line)):
                    break
                end = start
            except MALFORMED:
                continue
        else:
            if end is None and not self._is_fresh():
                return False
        if end is not None:
            os.truncate(self.path, end)
        return True

    def _is_fresh(self) -> bool:
        """Return whether nothing was written to the file but what stands before all entries."""
        return complete_size(self.path) == 0

    @abstractmethod
    def _line(self, entry: dict[str, Any]) -> str:
        """Return an entry as a line, without its end."""

    @abstractmethod
    def _values(self, line: bytes) -> dict[str, Any]:
        """Return the entry of a line; an error of Python: it is none."""


class JSONLTracker(FileTracker):
    """Writes one JSON object a line."""

    name = "jsonl"

    @override
    def _line(self, entry: dict[str, Any]) -> str:
        return json.dumps(entry, allow_nan=False)

    @override
    def _values(self, line: bytes) -> dict[str, Any]:
        return json_object(line)


class CSVTracker(FileTracker):
    """Writes one row each time, under the names of all values so far.

    Where a name comes for the first time the file is written anew with one more column, which is
    empty in the rows before. A list or a mapping is JSON in its cell. A name or a text that a
    spreadsheet would take for a formula has a `'` before it.
    """

    name = "csv"
    _columns: tuple[str, ...] = ()

    @override
    def start(self) -> None:
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"`{self.path}` is no ordinary file, which a table needs to grow in.")
        super().start()
        self._read_columns()

    @override
    def cut(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> bool:
        self._read_columns()
        return super().cut(is_wanted)

    def _read_columns(self) -> None:
        with suppress(ValueError):  # no table: what is logged begins one
            self._columns = tuple(_cells(next(lines(self.path), b"")))

    @override
    def _is_fresh(self) -> bool:
        return "step" in self._columns and sum(1 for _ in islice(lines(self.path), 2)) == 1

    @override
    def _line(self, entry: dict[str, Any]) -> str:
        entry = {_harmless(name.replace("\n", " ")): value for name, value in entry.items()}
        if new := [name for name in entry if name not in self._columns]:
            with giving_up(self._called, lambda: None, f"the table lacks {new} for now"):
                self._widen((*self._columns, *new))
        return _row(map(entry.get, self._columns))

    @override
    def _values(self, line: bytes) -> dict[str, Any]:
        return dict(zip(self._columns, _cells(line), strict=True))

    def _widen(self, columns: tuple[str, ...]) -> None:
        """Write the file anew with more columns, which are the last."""
        assert self.tracker is not None
        blank = b"," * (len(columns) - len(self._columns)) + b"\n"
        rows = islice(lines(self.path), bool(self._columns), None)
        head = _row(columns).encode() + b"\n"
        replace_file(self.path, chain([head], (row + blank for row in rows)))
        self._columns = columns
        self.tracker.close()
        self.tracker = Lines(self.path, self._called)


def _cells(line: bytes) -> list[str]:
    try:
        return next(csv.reader([line.decode(errors="replace")]), [])
    except csv.Error as error:
        raise ValueError(error) from None


def _row(values: Iterable[Any]) -> str:
    text = io.StringIO()
    cells = [json.dumps(v) if isinstance(v, list | dict) else v for v in values]
    cells = [_harmless(v) if isinstance(v, str) and v != "-Infinity" else v for v in cells]
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue().replace("\n", " ")  # so that a text stays one line of the file


def _harmless(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
