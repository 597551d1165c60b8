"""From which checkpoint of a run a replay begins, and to which window it goes; on process 0."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.basics.outputs import folder_of_run
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.checkpoint.listing import Entry
from trainkit.checkpoint.training_state import versions
from trainkit.errors import ConfigError
from trainkit.journal import Journal, Record, digest, read


def find_run(output_dir: Path | None, new_run: bool, asked: Path | None) -> Path:
    """Return the folder of the run that is made again.

    Args:
        output_dir: That of the trainer.
        new_run: Whether it holds runs in folders of their own.
        asked: What the replay was asked for; None: that of the trainer, or the newest in there.
    """
    if output_dir is None:
        raise ConfigError(
            "A replay reads the `output_dir` of a run, but the trainer has none. Pass "
            "`Trainer(output_dir=...)`, as when the run was made."
        )
    if asked is None:
        return folder_of_run(output_dir, "must") if new_run else output_dir
    directory = asked.resolve()
    if output_dir.resolve() != (directory.parent if new_run else directory):
        raise ConfigError(
            f"The program trains into `{output_dir}`, and a replay of `{asked}` was asked for. One "
            "that makes several trainings is replayed by `trainer.replay` in it."
        )
    return asked


def plan(
    folder: Path, step: int | None, until_nonfinite: bool, processes: int
) -> tuple[dict[str, Any], dict[int, Record]]:
    """Return where to begin and to end, and the windows between, by their numbers.

    Raises:
        ConfigError: The run has no journal, no checkpoints or no such step, or was made by other
            processes.
    """
    journal = read(folder)
    last = journal.records[-1] if journal.records else None
    if step is not None:
        journal.check_reached(step)
    target = None if step is None else journal.record_of(step)
    bad = _first_bad(journal) if until_nonfinite else target
    before = step
    if step is None and bad is not None:
        before = bad.step + (bad.skip is not None)
    entry = _checkpoint(journal, before, only_finite=until_nonfinite)
    begin, stop = entry.step if entry else 0, bad.attempt if bad else math.inf
    records = [r for r in journal.records if r.step >= begin and r.attempt <= stop]
    headers = [journal.header_of(r) for r in records if r.step > begin] or [journal.header]
    _check_processes(headers, processes)
    attempt = target.attempt if target else last.attempt + 1 if last else 0
    window = {
        "checkpoint": entry and str(entry.path),
        "target": 0 if until_nonfinite else attempt,
        "notes": [*_changes(headers[-1])],
        "fit": headers[-1]["start"].get("fit"),
    }
    return window, {record.attempt: record for record in records}


def _first_bad(journal: Journal) -> Record | None:
    """Return the first window that is known to be bad, else the last that may be."""
    bad = next((r for r in journal.records if r.is_bad), None)
    # Of other processes, process 0 knows only that their gradients overflowed.
    return bad or next((r for r in reversed(journal.records) if r.skip is not None), None)


def _checkpoint(journal: Journal, before: int | None, *, only_finite: bool) -> Entry | None:
    """Return the newest one before a step; None: the start of the run."""
    folder = journal.path.parent / CHECKPOINTS
    ids = {header["run_id"] for header in journal.headers}
    candidates = [
        entry
        for entry in CheckpointStore(folder).checkpoints()
        if entry.manifest.is_resumable and (entry.manifest.run_id in ids or "" in ids)
    ]
    if not candidates:
        raise ConfigError(
            f"`{folder}` holds no checkpoint of this run, from which a replay could begin. Let a "
            "run save some by the callback `Checkpoint(...)`."
        )
    fit = [entry for entry in candidates if before is None or entry.step < before]
    fit = [entry for entry in fit if entry.manifest.is_finite or not only_finite]
    if not fit and journal.headers[0]["after"]:
        raise ConfigError(
            f"No checkpoint in `{folder}` is before step {before}, and the journal does not begin "
            "with the run. Keep more of them: `Checkpoint(keep_last=...)`."
        )
    return fit[-1] if fit else None


def _check_processes(headers: list[Mapping[str, Any]], size: int) -> None:
    sizes = {header["run"]["processes"] for header in headers}
    if sizes != {size}:
        told = " and then ".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"The windows up to this step were made by {told} processes, and now there are {size}. "
            "Start as many; where their number changed, take a later step."
        )


def _changes(header: Mapping[str, Any]) -> Iterator[str]:
    """Yield, in words, what is no longer as it was when the run was started."""
    for name, was in header["files"].items():
        path = Path(name)
        if not path.is_file() or digest(path) != was:
            yield f"`{name}` has changed since the run."
    for name, version in versions().items():
        if (was := header["versions"].get(name, version)) != version:
            yield f"{name} was {was} in the run, and is {version} now."
