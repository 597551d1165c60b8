"""Copies folders to and from storage: a checkpoint is there when its manifest is, and not before.

A folder that holds a manifest is a checkpoint, at whatever depth; all other files are copied one
by one. Names that begin with a dot stay where they are.
"""

import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainkit.checkpoint.checkpoint import verify
from trainkit.checkpoint.commit import throw_away
from trainkit.checkpoint.format.manifest import Manifest, read_manifest
from trainkit.checkpoint.format.names import MANIFEST, PINS, TEMPORARY
from trainkit.checkpoint.io import files
from trainkit.checkpoint.listing import Entry, in_order
from trainkit.errors import CheckpointError
from trainkit.storage.objects import Objects, StorageError

TOKEN = ".storage-token"
"""The file of a lease in its folder: whoever holds the folder comes after the one who wrote it."""

State = tuple[int, int]
"""Bytes of a file, and when it was changed."""


def checkpoints_in(folder: Path) -> dict[str, Manifest]:
    """Return the committed checkpoints below a folder, by their names from there on."""
    checkpoints = {}
    for parent, _, names in _walk(folder):
        if MANIFEST in names:
            try:
                checkpoints[parent.relative_to(folder).as_posix()] = read_manifest(parent)
            except CheckpointError:
                continue
    return checkpoints


def files_in(folder: Path) -> dict[str, State]:
    """Return the ordinary files below a folder that are of no checkpoint, by name."""
    files = {}
    for parent, _, names in _walk(folder):
        for name in names if not _named_like_one(parent.name) else ():
            path = parent / name
            with suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    state = status.st_size, status.st_mtime_ns
                    files[path.relative_to(folder).as_posix()] = state
    return files


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    for parent, folders, names in os.walk(folder):
        inner = (name for name in folders if not name.startswith("."))
        # What has a token of its own is uploaded by whoever wrote it.
        folders[:] = sorted(name for name in inner if not Path(parent, name, TOKEN).exists())
        yield Path(parent), folders, [name for name in names if not name.startswith(".")]


class Remote:
    """What an address holds; only whoever holds its lease may change it.

    Attributes:
        checkpoints: Those that are complete, by name.
        others: The bytes of all other objects that are of no checkpoint.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        sizes = {n: size for n, size in objects.names().items() if not _is_hidden(n)}
        self.checkpoints: dict[str, Manifest] = {}
        self._manifests: dict[str, bytes] = {}
        self.left: set[str] = set()  # checkpoints without a manifest: uploads that were cut
        for folder in {name.rpartition("/")[0] for name in sizes}:
            manifest = f"{folder}/{MANIFEST}"
            if manifest in sizes or _named_like_one(folder):  # some storages list what is new late
                self._manifests[manifest] = content = objects.read(manifest) or b""
                try:
                    self.checkpoints[folder] = Manifest.decode(content, Path(manifest))
                except CheckpointError:
                    self.left.add(folder)
        whole = self.checkpoints.keys() | self.left
        self.others = {n: s for n, s in sizes.items() if n.rpartition("/")[0] not in whole}
        self._found = sizes | {n: len(content) for n, content in self._manifests.items() if content}

    def newest_first(self) -> list[tuple[str, Manifest]]:
        """Return the checkpoints, the newest first."""
        found = in_order(Entry(Path(n), m.step, m) for n, m in self.checkpoints.items())
        return [(str(entry.path), entry.manifest) for entry in found[::-1]]

    def check_runs(self, folder: Path) -> None:
        """Raise CheckpointError where a folder and the address hold different trainings."""
        here = {manifest.run_id for manifest in checkpoints_in(folder).values()}
        there = {manifest.run_id for manifest in self.checkpoints.values()}
        if MANIFEST in self.others:  # the address is that of a checkpoint
            own = self.objects.read(MANIFEST) or b""
            there.add(Manifest.decode(own, Path(self.objects.address)).run_id)
        here, there = here - {""}, there - {""}  # states of own loops are of no run
        if here and there and not here & there:
            raise CheckpointError(
                f"`{self.objects.address}` and `{folder}`, where this machine keeps what is there, "
                "hold checkpoints of two different trainings, and either could go on. Remove the "
                "folder, or pass another address.",
                path=folder,
            )

    def fetch(self, name: str, folder: Path) -> None:
        """Bring a checkpoint to its place in a folder, verified; what was there goes.

        Raises:
            CheckpointError: It is broken there; the folder is as it was.
        """
        manifest, target = self.checkpoints[name], folder / name
        files.make_directories(target.parent)
        scratch = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}fetch-", dir=target.parent))
        try:
            for file in (*manifest.sizes(), MANIFEST):
                with suppress(FileNotFoundError):  # `verify` says that it is missing
                    self.objects.fetch(f"{name}/{file}", scratch / file)
            with blamed_on(f"{self.objects.address}/{name}"):
                verify(scratch)
            scratch.chmod(0o755)
            files.sync_directory(scratch)
            if target.exists():
                throw_away(target)
            files.rename(scratch, target)
            files.sync_directory(target.parent)
        finally:
            if scratch.exists():
                files.remove_tree(scratch)

    def fetch_others(self, folder: Path, *, replaces: bool) -> None:
        """Bring all that is of no checkpoint; what is there already stays, or is replaced."""
        for name in self.others:
            target = folder / name
            if replaces or not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                scratch = target.with_name(f".{target.name}.{os.getpid()}")
                scratch.unlink(missing_ok=True)
                self.objects.fetch(name, scratch)
                scratch.replace(target)

    def outline(self, folder: Path, *, logs: bool) -> None:
        """Bring manifests as they are, and of other files holes of their sizes."""
        is_one = MANIFEST in self._found  # the address of a checkpoint, which is brought whole
        for name, size in self._found.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content := self._manifests.get(name):
                path.write_bytes(content)
            elif name in self.others and (logs or is_one or path.name == PINS):
                with suppress(FileNotFoundError):  # removed meanwhile
                    self.objects.fetch(name, path)
            else:
                with path.open("xb") as hole:
                    hole.truncate(size)

    def copy(self, name: str, target: Path) -> None:
        """Bring a checkpoint as it is, and verify nothing."""
        target.mkdir(parents=True)
        for each in [each for each in self._found if each.rpartition("/")[0] == name]:
            with suppress(FileNotFoundError):  # removed meanwhile
                self.objects.fetch(each, target / each.rpartition("/")[2])

    def send(self, name: str, folder: Path, may_write: Callable[[], None]) -> None:
        """Write a checkpoint: its files, then its manifest, which must not be there.

        Args:
            may_write: Asked before each object; raises where it may not be written any more.

        Raises:
            FileNotFoundError: It was removed meanwhile; what arrived is no checkpoint.
            StorageError: It cannot be written, or another run's is there.
        """
        content = (folder / name / MANIFEST).read_bytes()
        manifest = Manifest.decode(content, folder / name)
        if self.objects.read(f"{name}/{MANIFEST}") is None:
            self.left.add(name)
            for file in manifest.sizes():
                may_write()
                self.objects.put_file(f"{name}/{file}", folder / name / file)
            may_write()
            self.objects.create(f"{name}/{MANIFEST}", content)
        # Also of a request whose answer was lost, and that was made again.
        if self.objects.read(f"{name}/{MANIFEST}") != content:
            raise ForeignCheckpoint(
                f"`{self.objects.address}/{name}` holds another checkpoint than `{folder / name}`: "
                "another run wrote there. It is left alone. Choose another `output_dir`."
            )
        self.left.discard(name)
        self.checkpoints[name] = manifest

    def remove(self, name: str) -> None:
        """Remove a checkpoint, or what is left of one, so that at no moment a part counts."""
        self.objects.delete([f"{name}/{MANIFEST}"])
        self.checkpoints.pop(name, None)
        self.objects.delete(self.objects.names(name))
        self.left.discard(name)


@contextmanager
def blamed_on(address: str) -> Iterator[None]:
    """Let an error on a copy name the address of what was copied."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"`{address}` is broken: {error}") from error


class ForeignCheckpoint(StorageError):
    """Under the name of a checkpoint another one is stored."""


def _named_like_one(name: str) -> bool:
    return re.fullmatch(r"step-\d{8,}(\.\d+)?", name.rpartition("/")[2], re.ASCII) is not None


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
