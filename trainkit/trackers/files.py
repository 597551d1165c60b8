"""Values as lines of a file: JSON or CSV."""

import csv
import io
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.errors import ConfigError
from trainkit.formatting import json_value
from trainkit.outputs import Lines, absolute, giving_up, replace_file
from trainkit.trackers.tracker import GeneralTracker, has_one

__all__ = ["CSVTracker", "FileTracker", "JSONLTracker"]


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
    _heads = 0  # lines before the first entry

    def __init__(self, run_name: str, logging_dir: str | Path, file_name: str = "") -> None:
        super().__init__()
        folder = absolute(logging_dir, "logging_dir") / run_name
        self.path = self.place = folder / (file_name or f"metrics.{self.name}")
        self._file: Lines | None = None
        self._start = time.monotonic()

    @property
    @override
    def tracker(self) -> Any:
        return self._file

    @override
    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file() and not self.path.read_bytes().endswith(b"\n"):
            self._replace(self._lines())
        self._file = Lines(self.path, self._called)

    @override
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(json_value(values), indent=1) + "\n"
        self.path.with_name(f"{self.path.stem}.hparams.json").write_text(text, encoding="utf-8")

    @override
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self._file is None:
            raise ConfigError("The tracker has ended. Log before `end_training`.")
        scalars = {name: v.item() if has_one(v) else v for name, v in values.items()}
        seconds = round(time.monotonic() - self._start, 3)
        line = self._line(json_value({"step": step, **scalars, "time/seconds": seconds}))
        self._file.write(line)

    @override
    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def cut(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Keep the lines whose values are wanted, before `start`.

        Raises:
            ConfigError: A line is none of this tracker, which `is_wanted` may say by an error of
                Python; the file is as it was.
        """
        kept = []
        for number, line in enumerate(self._lines(), 1):
            try:
                if number <= self._heads or is_wanted(self._values(line)):
                    kept.append(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{self.path}, line {number}: this is no line of {self._called}, so the file "
                    "was left as it is. Pass another `path`, or move the file away."
                ) from None
        self._replace(kept)

    def _lines(self) -> list[str]:
        """Return the lines, but for half a one at the end, which a killed process left."""
        return self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]

    def _replace(self, lines: Iterable[str]) -> None:
        replace_file(self.path, "".join(f"{line}\n" for line in lines).encode())

    @abstractmethod
    def _line(self, entry: dict[str, Any]) -> str:
        """Return an entry as a line, without its end."""

    @abstractmethod
    def _values(self, line: str) -> Any:
        """Return the entry of a line."""


class JSONLTracker(FileTracker):
    """Writes one JSON object a line."""

    name = "jsonl"

    @override
    def _line(self, entry: dict[str, Any]) -> str:
        return json.dumps(entry, allow_nan=False)

    @override
    def _values(self, line: str) -> Any:
        return json.loads(line)


class CSVTracker(FileTracker):
    """Writes one row each time, under the names of all values so far.

    Where a name comes for the first time the file is written anew with one more column, which is
    empty in the rows before. A list or a mapping is JSON in its cell.
    """

    name = "csv"
    _heads = 1
    _columns: tuple[str, ...] = ()

    @override
    def start(self) -> None:
        if self.path.exists() and not self.path.is_file():
            raise ConfigError(f"`{self.path}` is no ordinary file, which a table needs to grow in.")
        super().start()
        self._lines()

    @override
    def _lines(self) -> list[str]:
        lines = super()._lines()
        self._columns = tuple(next(csv.reader(lines[:1]), ()))
        return lines

    @override
    def _line(self, entry: dict[str, Any]) -> str:
        entry = {name.replace("\n", " "): value for name, value in entry.items()}
        if new := [name for name in entry if name not in self._columns]:
            with giving_up(self._called, lambda: None, f"the table lacks {new} for now"):
                self._widen((*self._columns, *new))
        return _row(map(entry.get, self._columns))

    @override
    def _values(self, line: str) -> Any:
        return dict(zip(self._columns, next(csv.reader([line])), strict=True))

    def _widen(self, columns: tuple[str, ...]) -> None:
        """Write the file anew with more columns, which are the last."""
        assert self._file is not None
        blank = "," * (len(columns) - len(self._columns))
        self._replace([_row(columns), *(f"{row}{blank}" for row in self._lines()[1:])])
        self._columns = columns
        self._file.close()
        self._file = Lines(self.path, self._called)


def _row(values: Iterable[Any]) -> str:
    text = io.StringIO()
    cells = [json.dumps(v) if isinstance(v, list | dict) else v for v in values]
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue().replace("\n", " ")  # so that a text stays one line of the file
