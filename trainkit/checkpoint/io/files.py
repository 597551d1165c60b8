"""The only place that changes the disk: one small function for each operation of a commit.

The others call these through the module (`files.rename(...)`), so that a test can record every
operation, leave one out, or let one fail. Files and folders are writable by their owner alone,
whatever the umask. All functions raise `OSError` with the name of the file.
"""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import TypeAlias

from trainkit.basics.systems import IN_FOLDERS, ITSELF

_LARGEST_WRITE = 1 << 30  # Linux writes at most 2 GiB at once
_OPEN_FILES = 8  # that are written or wait for the disk

Chunks: TypeAlias = Iterable[bytes | memoryview]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the system name a file that it knows by its descriptor alone."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def make_directory(path: Path) -> None:
    """Make a folder that must not exist."""
    os.mkdir(path, 0o755)


def make_directories(path: Path) -> None:
    """Make a folder and those above it, where they are missing, so that a power cut keeps them."""
    if not path.parent.exists():
        make_directories(path.parent)
    with suppress(FileExistsError):
        make_directory(path)
    # Also where it exists: whoever made it may have been stopped before this.
    sync_directory(path.parent)


def create(path: Path) -> int:
    """Create a file that must not exist; return its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | ITSELF, 0o644)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left[:_LARGEST_WRITE]) :]


def sync(descriptor: int) -> None:
    """Wait until what was written to a file survives a power cut."""
    os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Close a file."""
    os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in a folder survive a power cut."""
    if not IN_FOLDERS:  # Windows keeps names by itself
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name in the same folder, at once or not at all."""
    os.replace(source, target)


def remove_file(directory: int, name: str, path: Path) -> None:
    """Remove the file or link `name` from the open folder `directory`, whose path is `path`."""
    os.unlink(name, dir_fd=directory)


def remove_directory(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)


def write_file(path: Path, chunks: Chunks) -> None:
    """Create a file with this content, and wait until it survives a power cut."""
    _keep(_filled(path, chunks), path)


def write_files(contents: Iterable[tuple[Path, Chunks]]) -> None:
    """Create files, one after the other, and wait until all survive a power cut.

    The disk takes a file while the next one is hashed and copied. It is asked for whole files: to
    ask for parts of one that is still written to makes writing wait for the disk.
    """
    # Not an executor: it takes nothing while Python shuts down, and then waits for a hung disk.
    filled: SimpleQueue[tuple[int, Path] | None] = SimpleQueue()
    room = Semaphore(_OPEN_FILES)
    failures: list[Exception] = []

    def keep_all() -> None:
        while (one := filled.get()) is not None:
            try:
                _keep(*one)
            except Exception as error:  # raised where the caller waits
                failures.append(error)
            room.release()

    disk = Thread(target=keep_all, name="trainkit-sync", daemon=True)
    try:
        disk.start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start none while they shut down
        for path, chunks in contents:
            write_file(path, chunks)
        return
    try:
        for path, chunks in contents:
            room.acquire()
            filled.put((_filled(path, chunks), path))
    finally:
        filled.put(None)
        disk.join()
    if failures:
        raise failures[0]


def _filled(path: Path, chunks: Chunks) -> int:
    """Create a file with this content; return its descriptor."""
    descriptor = create(path)
    try:
        with naming(path):
            for chunk in chunks:
                write(descriptor, chunk)
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def _keep(descriptor: int, path: Path) -> None:
    """Wait until a file survives a power cut, and close it."""
    try:
        with naming(path):
            sync(descriptor)
    finally:
        close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; links are removed, never followed."""
    is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    if not IN_FOLDERS:
        shutil.rmtree(path) if is_folder else os.unlink(path)
        return
    if not is_folder:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            remove_file(directory, path.name, path.parent)
        finally:
            os.close(directory)
        return
    for name, folders, others, directory in os.fwalk(path, topdown=False, follow_symlinks=False):
        links = [folder for folder in folders if _is_link(directory, folder)]  # fwalk calls them so
        for other in [*others, *links]:
            remove_file(directory, other, Path(name))
        remove_directory(Path(name))


def _is_link(directory: int, name: str) -> bool:
    try:
        os.readlink(name, dir_fd=directory)
    except OSError:
        return False  # also a folder that has been removed by now
    return True
