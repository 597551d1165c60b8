"""The steps that a person wants to keep: a small file beside the checkpoints."""

import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from trainkit.checkpoint.format import strict_json
from trainkit.checkpoint.format.names import PINS, TEMPORARY
from trainkit.checkpoint.io import files
from trainkit.checkpoint.io.reading import open_directory, open_file
from trainkit.errors import CheckpointError

__all__ = ["read_pins", "write_pins"]


def read_pins(directory: Path) -> frozenset[int]:
    """Return the pinned steps; none where there is no file.

    Raises:
        CheckpointError: The file is broken, so nobody knows what must stay.
    """
    path = directory / PINS
    if not path.exists() and not path.is_symlink():
        return frozenset()
    with open_directory(directory) as descriptor, open_file(descriptor, PINS, directory) as file:
        content = file.read(min(file.size, strict_json.LARGEST))
    try:
        steps = strict_json.parse(content)["pinned"]
        if any(type(step) is not int for step in steps):
            raise ValueError("a step is no whole number")
        return frozenset(steps)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f'`{path}` must look like {{"pinned": [120, 240]}}, but does not: {error}. Repair or '
            "remove it; until then no checkpoint is removed.",
            path=directory,
            file=PINS,
        ) from error


def write_pins(directory: Path, steps: Iterable[int]) -> None:
    """Replace the pinned steps, so that a power cut leaves the old ones or the new ones.

    Raises:
        CheckpointError: It failed; the old ones stay.
    """
    temporary = directory / f"{TEMPORARY}pins-{uuid.uuid4().hex[:12]}"
    content = strict_json.dump({"pinned": sorted(steps)}) + b"\n"
    try:
        files.write_file(temporary, [content])
        files.rename(temporary, directory / PINS)
        files.sync_directory(directory)
    except OSError as error:
        with suppress(OSError):
            files.remove_tree(temporary)
        raise CheckpointError(
            f"`{directory / PINS}` cannot be written: {error}. Nothing is pinned or unpinned.",
            path=directory,
            file=PINS,
            errno=error.errno,
        ) from error
