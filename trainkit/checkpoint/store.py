"""Where checkpoints are: how they are saved, found and removed. When, and what stays, is policy."""

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.basics.config import check_whole
from trainkit.basics.outputs import unwritable
from trainkit.checkpoint.checkpoint import Checkpoint, check_sizes
from trainkit.checkpoint.commit import Agree, Save, alone, throw_away
from trainkit.checkpoint.format import strict_json
from trainkit.checkpoint.format.names import PINS, TEMPORARY, TRASH
from trainkit.checkpoint.io import files
from trainkit.checkpoint.io.reading import open_directory, open_file
from trainkit.checkpoint.listing import Entry, broken_folders, committed
from trainkit.errors import CheckpointError

_NOT_FINITE = "its parameters, or the loss before it, are not finite"


class CheckpointStore:
    """The checkpoints in a directory.

    Args:
        directory: Usually `<output_dir>/checkpoints`; made by the first save.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self.last_saved: Entry | None = None
        """What was committed last through this store; None on other processes than 0."""

    def save(
        self,
        step: int,
        parts: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any],
        agree: Agree = alone,
        courier: Any = None,
    ) -> Path:
        """Write a checkpoint and return its folder, once it survives a power cut.

        Every process calls it; it returns when process 0 has committed. An earlier save of the
        same step by the same run is replaced, and removed after the commit.

        Args:
            step: Updates applied; the same on all processes.
            parts: What this process writes: the state by name of the part. Names are unique over
                all processes.
            metadata: Small values for the manifest, of which those of process 0 count; `run_id`
                names the run, and `metrics` is what the best are chosen by.
            agree: `agree(value, action)` runs `action` on process 0, which commits, with the
                values of all processes in order of their ranks, and returns its result on all.
            courier: What brings process 0 the files of those that do not see the directory.

        Raises:
            CheckpointError: The save failed on some process; raised by all. Nothing of it is
                left, and earlier checkpoints are untouched.
        """
        check_whole("step", step, least=0)
        save = Save(self.directory, step, metadata, agree, courier)
        path = save.run(parts)
        self.last_saved = save.entry
        return path

    def probe(self) -> None:
        """Make the directory and try out there all that a save does; call it before training."""
        temporary = self.directory / f"{TEMPORARY}probe-{uuid.uuid4().hex[:12]}"
        renamed = temporary.with_name(f"{temporary.name}-renamed")
        try:
            files.make_directories(self.directory)
            files.write_file(temporary, [bytes(4096)])
            files.rename(temporary, renamed)
            files.sync_directory(self.directory)
        except OSError as error:
            raise unwritable(self.directory, error, "Choose another `output_dir`") from error
        finally:
            for path in (temporary, renamed):
                with suppress(OSError):
                    files.remove_tree(path)

    def checkpoints(self) -> list[Entry]:
        """Return the committed checkpoints by the step in their manifests, the newest last."""
        return committed(self.directory)

    def newest_valid(self, report: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest checkpoint that verifies, or None; `report` as in `valid`."""
        return next(self.valid(report), None)

    def valid(
        self, report: Callable[[str], None], *, contents: bool = True
    ) -> Iterator[Checkpoint]:
        """Yield the checkpoints that verify, the newest first; those that are not finite come last.

        Older ones are not looked at before they are asked for.

        Args:
            report: Called with a sentence on each broken one that is newer, or has no step, and
                on each one that is not finite.
            contents: Whether their bytes are compared too, not names and sizes alone.
        """
        for _, error in broken_folders(self.directory):
            report(f"Ignored: {error}")
        newest_first, told = self.checkpoints()[::-1], set[Path]()
        for entry in [entry for entry in newest_first if not entry.manifest.is_resumable]:
            report(f"Passed over `{entry.path}`: it holds the weights alone.")
        entries = [entry for entry in newest_first if entry.manifest.is_resumable]
        for entry in sorted(entries, key=lambda entry: not entry.manifest.is_finite):
            try:
                checkpoint = (self.open if contents else self.open_unverified)(entry.path)
            except CheckpointError as error:
                report(f"Skipped step {entry.step}: {error}")
                continue
            for newer in entries[: entries.index(entry)]:
                if not newer.manifest.is_finite and newer.path not in told:
                    report(f"Passed over step {newer.step}: {_NOT_FINITE}.")
                    told.add(newer.path)
            if not checkpoint.manifest.is_finite:
                report(f"Step {entry.step} is the newest one left, but {_NOT_FINITE}.")
            yield checkpoint

    def open(self, path: Path) -> Checkpoint:
        """Return a checkpoint after every byte of it was verified."""
        checkpoint = self.open_unverified(path)
        checkpoint.verify_rest()
        return checkpoint

    def open_unverified(self, path: Path) -> Checkpoint:
        """Return a checkpoint of which names and sizes were compared, but no contents.

        For whoever reads all of it at once, which verifies what is read: it saves reading it
        twice. The rest is verified by `Checkpoint.verify_rest`.
        """
        return Checkpoint(Path(path), check_sizes(Path(path)))

    def clean(self) -> None:
        """Remove what interrupted saves and removals left; the caller holds the run's lock."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return  # nothing has been saved yet
        for name in names:
            if name.startswith((TEMPORARY, TRASH)):
                _removing(self.directory / name, files.remove_tree)

    def remove(self, entry: Entry) -> None:
        """Remove a checkpoint; links are not followed."""
        path = entry.path
        if path.parent != self.directory or path.is_symlink() or not path.is_dir():
            raise CheckpointError(
                f"`{path}` is not a folder in `{self.directory}`. It is left alone.", path=path
            )
        _removing(path, throw_away)

    def pinned(self) -> frozenset[int]:
        """Return the steps that rotation never removes."""
        return _read_pins(self.directory)

    def pin(self, step: int) -> None:
        """Let rotation never remove a step."""
        steps = [entry.step for entry in self.checkpoints()]
        if step not in steps:
            raise CheckpointError(
                f"`step` must be one of the checkpoints {steps}, but is {step!r}.",
                path=self.directory,
            )
        _write_pins(self.directory, self.pinned() | {step})

    def unpin(self, step: int) -> None:
        """Let rotation decide on a step again."""
        _write_pins(self.directory, self.pinned() - {step})


def _removing(path: Path, remove: Callable[[Path], None]) -> None:
    try:
        remove(path)
    except OSError as error:
        raise CheckpointError(
            f"`{path}` cannot be removed: {error}. Remove it by hand, or change its permissions.",
            path=path,
            errno=error.errno,
        ) from error


def _read_pins(directory: Path) -> frozenset[int]:
    """Return the pinned steps; none where there is no file."""
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


def _write_pins(directory: Path, steps: Iterable[int]) -> None:
    """Replace the pinned steps, so that a power cut leaves the old ones or the new ones."""
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
