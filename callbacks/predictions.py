"""Write what an evaluation predicted, sample by sample."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path
from string import Formatter
from typing import IO, Any, ClassVar

from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.basics.formatting import json_value
from trainkit.basics.outputs import absolute, check_folder
from trainkit.basics.written_files import check_file, giving_up
from trainkit.callbacks._support.kept import Keeps
from trainkit.callbacks._support.log_paths import log_place
from trainkit.errors import ConfigError, DataError
from trainkit.metrics.metric import Metric
from trainkit.training.run import Run
from trainkit.types import Scalars

__all__ = ["Predictions"]

Extra = Callable[[int, Any, Any], Mapping[str, Any]]

COLUMNS = ("index", "prediction", "reference")
PLACES = ("epoch", "loader", "step")
SUFFIXES = (".csv", ".jsonl")


class Predictions(Keeps):
    """Writes the predictions of evaluations to a file, each sample once, in the loader's order.

    A line has `index`, the position in the loader from 0, `prediction`, `reference`, and what
    `extra` adds. They are what a metric such as accuracy gets: classes, values, or what
    `evaluation_step` returns under `predictions`, and the references. Tensors are numbers and
    nested lists; in JSON, NaN and infinities are the texts "NaN", "Infinity" and "-Infinity". A
    cell of a CSV file that is no number or text holds JSON.

    The main process writes. A file appears, or is replaced, when it is complete. Without `{step}`
    in its name it holds the predictions of the latest evaluation, at the end those of the last.

    `trainer.predict` returns its predictions, and no callback sees them; `Predictions.write`
    puts them into the same form.

    Args:
        path: Ends in `.jsonl` or `.csv`, and may hold `{step}`, `{epoch}` and `{loader}`, the
            name of an evaluation loader; with several of them it must hold the last. By default
            `predictions.jsonl` in the output directory.
        every: Evaluations between two that are written.
        extra: `(index, prediction, reference) -> columns`, called on the main process with what
            is written, for example to add the text of a sample.

    Raises:
        ConfigError: An argument makes no sense; at the start of `fit`: there is nothing to
            evaluate, no place to write, or the files of several loaders would be the same.
    """

    _kept: ClassVar = {"_evaluations": int}

    alike = ("every",)

    @checked
    def __init__(
        self, path: str | Path | None = None, *, every: int = 1, extra: Extra | None = None
    ) -> None:
        if path is not None:
            _check_path(Path(path))
        check_whole("every", every)
        if extra is not None and not callable(extra):
            raise ConfigError(
                "`extra` must be a function `(index, prediction, reference) -> columns`, but is "
                f"{extra!r}."
            )
        self.path = path
        self._base = Path()  # apart: its name may have braces, which are no places
        if path is not None and absolute(path, "path") != Path(path):
            self._base = Path.cwd()
        self.every = every
        self.extra = extra
        self._evaluations = 0
        self._recorder = _Recorder(extra)

    @override
    def check_output(self, run: Run) -> None:
        path, owner = self._path_of(run, ""), f"`{self.name}`"
        if not run.is_main_process:
            return
        if "{" in str(self.path):  # what it stands for changes
            start = Path(str(self.path).partition("{")[0] + "_").parent
            check_folder(run.place(self._base / start), owner)
        else:
            check_file(path, owner)

    @override
    def on_fit_start(self, run: Run) -> None:
        if not run.evaluation.loaders:
            raise ConfigError(
                "`Predictions` writes what evaluations predict, but `fit` was given no evaluation "
                "loader. Call `fit(model, (train, eval), ...)`, or leave the callback out."
            )
        paths = [self._path_of(run, name) for name in run.evaluation.loaders]
        if len(set(paths)) < len(paths):
            raise ConfigError(
                f"`Predictions` would write the evaluation loaders {sorted(run.evaluation.loaders)}"
                f" to one file, `{paths[0]}`. Put `{{loader}}` into `path`, for example "
                '`path="predictions-{loader}.jsonl"`.'
            )
        if run.checkpoints.resumed_from is None:
            self._evaluations = 0
        self._recorder.close()
        run.evaluation.metrics.append(self._recorder)  # what it lacks is said before the first step

    @override
    def on_evaluation_start(self, run: Run) -> None:
        self._evaluations += 1
        if self._recorder in run.evaluation.metrics:
            run.evaluation.metrics.remove(self._recorder)
        if self._evaluations % self.every:
            return
        run.evaluation.metrics.append(self._recorder)
        if run.is_main_process:
            self._recorder.begin(self._path_of(run, name) for name in run.evaluation.loaders)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self._recorder.close()

    @override
    def on_fit_end(self, run: Run) -> None:
        self._recorder.close()

    def _path_of(self, run: Run, loader: str) -> Path:
        if self.path is None:
            return log_place(run, None, "predictions.jsonl", owner="Predictions", argument="path")
        state = run.state
        name = str(self.path).format(step=state.step, epoch=state.epoch, loader=loader)
        return run.place(self._base / name)

    @staticmethod
    def write(path: str | Path, predictions: Any, references: Any = None) -> None:
        """Write predictions that are there already, such as those of `trainer.predict`.

        Call it on one process.

        Args:
            path: Ends in `.jsonl` or `.csv`; a file that is there is replaced.
            predictions: One entry for each sample.
            references: The same, or None.

        Raises:
            ConfigError: The ending is another.
            DataError: There are not as many references as predictions.
        """
        path = Path(path)
        _check_path(path, places=())
        table = _Table(path, None)
        try:
            table.add(predictions, references)
            table.publish()
        finally:
            table.discard()


class _Recorder(Metric):
    """Sits among the metrics of an evaluation, and writes what they get; gives no value."""

    name = "predictions"
    keys = ()

    def __init__(self, extra: Extra | None) -> None:
        self._extra = extra
        self._paths: Iterator[Path] | None = None  # of the loaders to come
        self._table: _Table | None = None

    def begin(self, paths: Iterator[Path]) -> None:
        """Write the evaluation that begins, each loader to its file."""
        self._paths = paths

    def close(self) -> None:
        """Write no further evaluation, and forget what is not complete."""
        self._paths = None
        self._give_up()

    @override
    def reset(self) -> None:
        if self._paths is not None:
            with self._writing():
                self._table = _Table(next(self._paths), self._extra)

    @override
    def update(self, predictions: Any, references: Any) -> None:
        with self._writing():
            if self._table is not None:
                self._table.add(predictions, references)

    @override
    def compute(self) -> dict[str, float]:
        with self._writing():
            if self._table is not None:
                self._table.publish()
        self._table = None
        return {}

    def _give_up(self) -> None:
        if self._table is not None:
            self._table.discard()
            self._table = None

    def _writing(self) -> AbstractContextManager[None]:
        lost = "the predictions of this evaluation are lost"
        return giving_up("`Predictions`", self._give_up, lost)


class _Table:
    """A file of predictions on its way: nobody sees it under its name before it is complete.

    Args:
        path: Where it will be.
        extra: Adds columns.
    """

    def __init__(self, path: Path, extra: Extra | None) -> None:
        self._path = path
        self._extra = extra
        self._index = count()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = path.with_name(f".{path.name}.partial")
        self._file: IO[str] = self._scratch.open("w", encoding="utf-8", newline="")
        self._csv: Any = csv.writer(self._file) if path.suffix == ".csv" else None
        self._columns: list[str] | None = None

    def add(self, predictions: Any, references: Any) -> None:
        """Write a line for each sample."""
        rows = _rows(predictions)
        others = [None] * len(rows) if references is None else _rows(references)
        if len(rows) != len(others):
            raise DataError(
                f"There are {len(rows)} predictions, but {len(others)} references. Return one of "
                "each for every sample."
            )
        for prediction, reference in zip(rows, others, strict=True):
            index = next(self._index)
            more = {} if self._extra is None else self._extra(index, prediction, reference)
            values = (index, prediction, reference)
            self._write({**dict(zip(COLUMNS, values, strict=True)), **more})

    def publish(self) -> None:
        """Give the file its name."""
        if self._csv is not None and self._columns is None:
            self._csv.writerow(COLUMNS)  # of no samples
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._scratch.replace(self._path)

    def discard(self) -> None:
        """Remove what was not published."""
        with suppress(OSError):  # of the disk that could not take it
            self._file.close()
        with suppress(OSError):
            self._scratch.unlink(missing_ok=True)

    def _write(self, row: dict[str, Any]) -> None:
        row = json_value(row)
        if self._csv is None:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            return
        if self._columns is None:
            self._columns = [*row]
            self._csv.writerow(self._columns)
        if self._columns != [*row]:
            raise DataError(
                f"`extra` returned the columns {[*row]} after {self._columns}. A CSV file has the "
                "same in each line; write `.jsonl`, or return them all each time."
            )
        simple = (str, int, float, type(None))
        self._csv.writerow(v if isinstance(v, simple) else json.dumps(v) for v in row.values())


def _check_path(path: Path, places: tuple[str, ...] = PLACES) -> None:
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"`path` must end in one of {SUFFIXES}, which says the format, but is `{path}`."
        )
    try:
        fields = {name for _, name, _, _ in Formatter().parse(str(path)) if name is not None}
    except ValueError as error:
        raise ConfigError(f"`path` is `{path}`, in which the braces do not match.") from error
    if places and not fields <= set(places):
        raise ConfigError(
            f"`path` may hold {', '.join(f'`{{{name}}}`' for name in places)}, but is `{path}`."
        )


def _rows(tree: Any) -> list[Any]:
    """Return the entries of the samples; a mapping or tuple of several values is put together."""
    if hasattr(tree, "tolist"):
        return list(tree.tolist())
    if isinstance(tree, Mapping):
        columns = zip(*(_rows(value) for value in tree.values()), strict=True)
        return [dict(zip(tree, values, strict=True)) for values in columns]
    if isinstance(tree, tuple):
        return [list(values) for values in zip(*map(_rows, tree), strict=True)]
    return list(tree)
