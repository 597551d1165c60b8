"""`trainkit runs`: list the runs in folders, by what they came to."""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.basics.formatting import duration, json_value
from trainkit.basics.hparams import flat
from trainkit.basics.parsing import nearest
from trainkit.basics.terminal import print_table
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.checkpoint.listing import committed
from trainkit.cli.addresses import LOGS
from trainkit.errors import ConfigError, TrainkitError
from trainkit.inspect.report.listing import facts, facts_of
from trainkit.inspect.report.records import METRICS, RunLog, find_runs, mapping
from trainkit.inspect.report.tables import number

_PLAIN = ("run", "state", "step", "epoch", "seconds", "started")
_MOST_METRICS = 3  # columns
_MOST_LETTERS = 40  # of a hyperparameter, or of how a run ended
Facts = Mapping[str, Any]


def add_to(commands: Any) -> None:
    """Add the command and its own command to the parser's `commands`."""
    help_text = "list runs: best metrics, steps, time, how they ended, hyperparameters"
    parser = commands.add_parser("runs", help=help_text, description=help_text)
    own = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = own.add_parser("ls", help=help_text, description=help_text)
    where = "a folder that holds runs, however deep, or is one"
    listing.add_argument("folders", metavar="DIR", nargs="+", type=Path, help=where)
    sort_help = f"a metric (best first), a hyperparameter, or {', '.join(_PLAIN)} (the default)"
    listing.add_argument("--sort", metavar="NAME", default="started", help=sort_help)
    listing.add_argument("--reverse", action="store_true", help="the other way round")
    listing.add_argument("--json", action="store_true", help="all that is known, for programs")
    listing.set_defaults(run=_list, reads={"folders": LOGS})


def _list(options: argparse.Namespace) -> int:
    results = [row for folder in options.folders for row in _read(folder)]
    read = [row for row in results if not isinstance(row, TrainkitError)]
    rows = _sorted(read, options.sort, options.reverse)
    if options.json:
        print(json.dumps(json_value(rows), indent=2))
    elif rows:
        _print(rows, options.sort)
    for error in results:
        if isinstance(error, TrainkitError):
            print(f"left out: {error}", file=sys.stderr)
    return int(len(rows) < len(results))


def _read(folder: Path) -> Iterator[Facts | TrainkitError]:
    """Yield what is known of each run in a folder; where one cannot be read, why."""
    paths = find_runs(folder)
    if not paths:
        raise ConfigError(
            f"`{folder}` {'holds no run' if folder.is_dir() else 'is no folder'}. Pass a folder in "
            "which runs have their `output_dir`; a run is what `JSONLLogger` or `Checkpoint` wrote."
        )
    for path in paths:
        name = str(path.parent if path.name in (CHECKPOINTS, METRICS) else path)
        try:
            is_log = path.name != CHECKPOINTS
            known = facts_of(path) if is_log else _of_checkpoints(path)
            yield {"run": name, **known}
        except TrainkitError as error:
            yield error


def _of_checkpoints(folder: Path) -> Facts:
    """Return what the manifests in a folder tell of a run that has no log."""
    told = [(entry.step, entry.manifest) for entry in committed(folder)]
    if not told:
        raise ConfigError(f"`{folder}` holds no checkpoint that is complete.")
    run = RunLog(name="", path=folder)
    match told[-1][1].metadata.get("keep_best"):
        case [str(name), ("min" | "max") as mode, *_]:
            run.keep_best, run.higher_is_better[name] = name, mode == "max"
    for step, manifest in told:
        epoch = manifest.metadata.get("epoch")
        run.add_lines([{**manifest.metrics, "step": step, "epoch": epoch}])
    return {**facts(run), "hparams": flat(mapping(manifest.metadata.get("hparams")))}


def _sorted(rows: Sequence[Facts], by: str, turned: bool) -> list[Facts]:
    """Return the rows in order, a metric's best first, those without the value last."""
    known = dict.fromkeys(name for row in rows for name in _values(row))
    if rows and by not in known:
        hint = nearest(by, known) or f" There is {', '.join(known)}."
        raise ConfigError(f"`--sort {by}`: no run has it.{hint}")

    def key(row: Facts) -> tuple[bool, Any]:
        value = _values(row)[by]
        return (False, value) if isinstance(value, int | float) else (True, str(value))

    higher = any(row["best"].get(by, {}).get("higher_is_better") for row in rows)
    there = [row for row in rows if _values(row).get(by) is not None]
    absent = [row for row in rows if _values(row).get(by) is None]
    return sorted(there, key=key, reverse=turned != higher) + absent


def _values(row: Facts) -> dict[str, Any]:
    """Return what a run can be sorted by, by name: of a metric the best value, else the last."""
    best = {name: point["value"] for name, point in row["best"].items()}
    last = {name: value for name, value in row["last"].items() if not math.isnan(value)}
    return {**last, **best, **_hparams(row), **{name: row.get(name) for name in _PLAIN}}


def _hparams(row: Facts) -> dict[str, Any]:
    taken = {*_PLAIN, *row["last"]}
    return {f"hparams.{n}" if n in taken else n: value for n, value in row["hparams"].items()}


def _print(rows: Sequence[Facts], by: str) -> None:
    texts: dict[str, set[str]] = {name: set() for row in rows for name in _hparams(row)}
    for name, values in texts.items():
        values.update(str(_hparams(row).get(name)) for row in rows if row["hparams"])
    differing = [name for name, values in texts.items() if name == by or len(values) > 1]
    metrics = {name for row in rows for name in row["best"]} | {by} - {*_PLAIN, *texts}
    chosen = {row["keep_best"] for row in rows}
    first = sorted(metrics, key=lambda n: (n != by, n not in chosen, n == "eval/loss", n))
    names = ["run", "state", *first[:_MOST_METRICS], "step", "seconds", "started", *differing]
    titles = [name.upper() if name in _PLAIN else name for name in names]
    print_table(titles, [[_cell(row, name) for name in names] for row in rows])


def _cell(row: Facts, name: str) -> str:
    value = _values(row).get(name)
    if value is None:
        return ""
    if name == "seconds":
        return duration(value)
    if name == "started":
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    if value in ("failed", "stopped"):
        value = f"{value}: {row['ending']}"
    elif value == "running or killed":
        value = f"{value}, {duration(max(0.0, time.time() - row['heard']))} ago"
    text = number(value) if isinstance(value, float) else str(value)
    return text if name == "run" else text[:_MOST_LETTERS] + "..." * (len(text) > _MOST_LETTERS)
