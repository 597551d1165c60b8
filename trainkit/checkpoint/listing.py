"""Which checkpoints a directory holds."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit.checkpoint.format.manifest import Manifest, read_manifest
from trainkit.checkpoint.format.names import CHECKPOINTS, WEIGHTS
from trainkit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint whose manifest has been read; its files may still be broken."""

    path: Path
    step: int
    manifest: Manifest


def folders(directory: Path) -> list[Path]:
    """Return the visible folders in a directory; links are left out."""
    try:
        with os.scandir(directory) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []  # nothing has been saved yet
    except OSError as error:
        raise CheckpointError(
            f"`{directory}` cannot be read: {error.strerror}. Make it readable, or pass another.",
            path=directory,
            errno=error.errno,
        ) from error
    return [directory / name for name in sorted(names)]


def committed(directory: Path) -> list[Entry]:
    """Return the checkpoints in a directory as `in_order` does.

    A folder without a valid manifest is none (rule 24).
    """
    entries = []
    for path in folders(directory):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        entries.append(Entry(path, manifest.step, manifest))
    return in_order(entries)


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Return checkpoints by step, the newest last; before them those that a run left."""
    found = sorted(entries, key=lambda entry: (entry.step, entry.manifest.revision))
    kept = {entry.path for entry in on_the_way(found)}
    return sorted(found, key=lambda entry: entry.path in kept)


def on_the_way(entries: Sequence[Entry]) -> list[Entry]:
    """Return, in their order, those that the newest one came after, and itself."""
    way: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: entry.manifest.age):
        while way and way[-1].step > entry.step:
            way.pop()
        way.append(entry)
    kept = {entry.path for entry in way}
    return [entry for entry in entries if entry.path in kept]


def of_run(directory: Path) -> list[Entry]:
    """Return the checkpoints in a run's directory: those to resume from, then those of weights."""
    return [*committed(directory / CHECKPOINTS), *committed(directory / WEIGHTS)]


def broken_folders(directory: Path) -> Iterator[tuple[Path, CheckpointError]]:
    """Yield the folders that are named like checkpoints but have no valid manifest, and why."""
    for path in folders(directory):
        if path.name.startswith("step-"):
            try:
                read_manifest(path)
            except CheckpointError as error:
                yield path, error
