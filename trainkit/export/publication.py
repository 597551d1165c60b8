"""Files that appear in a folder when all of them are complete, and not before."""

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainkit.basics.outputs import address_of
from trainkit.basics.systems import ITSELF
from trainkit.checkpoint.format.names import MANIFEST
from trainkit.checkpoint.io import files
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export.layout import ADAPTER, is_weights
from trainkit.lazy import ask

_TEMPORARY = ".tmp-export-"
_LARGEST_COMPARED = 1 << 24  # bytes; larger files count as changed


class Publication:
    """An export on its way into `directory`.

    Files are written into the hidden `folder` first. `commit` moves them to their names so that a
    reader, also after a crash, finds the earlier export, the new one, or none, but never a
    mixture of both.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / f"{_TEMPORARY}{uuid.uuid4().hex[:12]}"

    def begin(self) -> None:
        """Make the folders, and remove what interrupted exports left.

        Raises:
            ConfigError: The directory is a file, or holds a checkpoint.
            OSError: It cannot be written to.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise ConfigError(f"`{self.directory}` is a file. Pass a folder to export into.")
        if (self.directory / MANIFEST).exists():
            raise ConfigError(
                f"`{self.directory}` is a checkpoint, which an export would break. Pass another "
                "folder."
            )
        files.make_directories(self.directory)
        for name in os.listdir(self.directory):
            if name.startswith(_TEMPORARY):
                files.remove_tree(self.directory / name)
        files.make_directory(self.folder)

    def commit(self, entry: str) -> None:
        """Give the files their names; `entry` is the one that readers open first."""
        names = sorted(os.listdir(self.folder))
        others = [name for name in names if name != entry]
        for name in others:
            self._sync(name)  # also what a library wrote
        self._sync(entry)
        old = {name for name in os.listdir(self.directory) if is_weights(name)}
        if entry.startswith(ADAPTER):  # what it adapts may lie in the same folder
            old = {name for name in old if name.startswith("adapter_")}
        if any(self._changes(name) for name in others):
            # A reader must not follow the old entry to the new files.
            self._remove(sorted(name for name in old if "-of-" not in name))
        for name in others:
            files.rename(self.folder / name, self.directory / name)
        files.sync_directory(self.directory)
        files.rename(self.folder / entry, self.directory / entry)
        files.sync_directory(self.directory)
        # The entries go first: without them the rest means nothing.
        stale = old - set(names)
        self._remove(sorted(name for name in stale if "-of-" not in name))
        self._remove(sorted(name for name in stale if "-of-" in name))
        files.remove_directory(self.folder)
        if address_of(self.directory) is not None:
            ask("send_files")(self.directory, [*others, entry], sorted(stale))

    def discard(self) -> None:
        """Remove what has not been published; what cannot be removed stays hidden."""
        with suppress(OSError):
            files.remove_tree(self.folder)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Turn an error of the system into one that says that nothing was exported."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"The model could not be exported to `{self.directory}`: {error}. An earlier "
                "export there is as it was, unless its files were being replaced.",
                path=self.directory,
                errno=error.errno,
            ) from error

    def _changes(self, name: str) -> bool:
        """Return whether a file stands under this name already, with another content."""
        old, new = self.directory / name, self.folder / name
        if not old.exists():
            return False
        large = max(old.stat().st_size, new.stat().st_size) > _LARGEST_COMPARED
        return large or old.read_bytes() != new.read_bytes()

    def _sync(self, name: str) -> None:
        descriptor = os.open(self.folder / name, os.O_RDWR | ITSELF)
        try:
            files.sync(descriptor)
        finally:
            files.close(descriptor)

    def _remove(self, names: Iterable[str]) -> None:
        removed = False
        for name in names:
            with suppress(FileNotFoundError):
                files.remove_tree(self.directory / name)
                removed = True
        if removed:
            files.sync_directory(self.directory)
