"""Machines that do not see the folder of process 0: what they save, and what they read."""

import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from trainkit.basics.outputs import absolute, address_of, storage_folder
from trainkit.checkpoint.checkpoint import Checkpoint
from trainkit.checkpoint.format.manifest import Manifest
from trainkit.checkpoint.format.names import MANIFEST, is_of_one_process, owner_of
from trainkit.checkpoint.io import files
from trainkit.checkpoint.io.files import Chunks
from trainkit.distributed import Processes, run_on_all, run_on_main
from trainkit.distributed.collectives import first_with
from trainkit.storage.copies import blamed_on
from trainkit.storage.objects import Objects, StorageError

_PIECE = 1 << 22  # bytes that a process sends at once, if they are few
_HELD = 1 << 28  # bytes that process 0 holds of all of them

OfAll = Callable[[Callable[[], Any], Callable[[list[Any]], Any]], Any]
"""`of_all(action, conclude)` runs `action` on every process, then `conclude` on process 0 with what
each returned, and returns its result on all; if anything fails, all raise."""


def courier(processes: Processes, folder: Path) -> "Courier | None":
    """Return what brings process 0 the files of those that do not see `folder`; None: all see it.

    Every process must call it, with its own place of a folder that process 0 has made.
    """
    world = processes.world
    if world.size == world.local_size:
        return None
    name = f".trainkit-shared-{uuid.uuid4().hex}"
    run_on_main(processes, lambda: (folder / name).touch())
    sees = (folder / name).exists()
    everywhere = all(processes.all_gather_objects(sees))
    run_on_main(processes, lambda: (folder / name).unlink())
    piece = min(_PIECE, max(1 << 16, _HELD // world.size))
    return None if everywhere else Courier(is_elsewhere=not sees, piece=piece)


class Courier:
    """Brings process 0 what other processes have to write, where some do not see its folder."""

    def __init__(self, *, is_elsewhere: bool, piece: int) -> None:
        self._is_elsewhere = is_elsewhere
        self._piece = piece  # bytes

    def deliver(self, contents: Iterable[tuple[Path, Chunks]], folder: Path, of_all: OfAll) -> bool:
        """Send files to process 0, which writes them to `folder`; every process must call it.

        They have arrived, and survive a power cut, when this returns.

        Returns:
            Whether those of this process were sent; else it writes them itself.
        """
        pieces = _pieces(contents, self._piece) if self._is_elsewhere else iter(())
        open_files: dict[Path, int] = {}

        def take(sent: list[tuple[str, bytes] | None]) -> bool:
            for name, piece in filter(None, sent):
                path = folder / name
                with files.naming(path):
                    if path not in open_files:
                        open_files[path] = files.create(path)
                    files.write(open_files[path], piece)
            if any(sent):
                return True
            for path, descriptor in open_files.items():
                with files.naming(path):
                    files.sync(descriptor)
            return False

        try:
            while of_all(lambda: next(pieces, None), take):
                pass
        finally:
            for descriptor in open_files.values():
                files.close(descriptor)
        return self._is_elsewhere


def _pieces(contents: Iterable[tuple[Path, Chunks]], size: int) -> Iterator[tuple[str, bytes]]:
    """Yield what is in files, with their names: one file after the other, in pieces of a size."""
    for path, chunks in contents:
        piece = bytearray()
        for chunk in chunks:
            left = memoryview(chunk).cast("B")
            while left:
                taken = left[: size - len(piece)]
                piece += taken
                left = left[len(taken) :]
                if len(piece) == size:
                    yield path.name, bytes(piece)
                    piece.clear()
        if piece:
            yield path.name, bytes(piece)


Here = tuple[Path, Callable[[str], None] | None]
"""Where a checkpoint is on this machine, and what brings a file of it that is not there yet."""


@contextmanager
def on_this_machine(
    path: Path, processes: Processes, mirror: Any = None, *, sharded: bool | None = None
) -> Iterator[Here]:
    """Give the place of a checkpoint of process 0 on this machine, inside; every process enters it.

    A machine that has it not fetches it from its address, for all its processes, and removes it
    afterwards. What has no address, as in a dry run, process 0 sends.

    Args:
        path: The folder of it; that of process 0 counts.
        mirror: What uploads it, on process 0, where a run is under way.
        sharded: None: all of it is fetched at once. Else, where as many processes saved it, what
            all have alike and what those of this machine wrote: of shards only where this is True.
            The rest comes when it is asked for.

    Raises:
        CheckpointError: It cannot be fetched; on all processes.
    """
    world = processes.world
    if world.size == world.local_size:
        yield path, None
        return
    address, digest = run_on_main(processes, lambda: (address_of(path) or "", _digest(path)))
    folder = absolute(address, "output_dir", stored=True) if address else path
    lacks = _digest(folder) != digest
    if first_with(processes, lacks) is None:
        yield folder, None
        return
    scratch = storage_folder() / f".trainkit-{digest}"  # where no checkpoint is looked for
    receives = lacks and world.is_local_main

    def upload() -> None:
        if mirror is not None:
            mirror.wait_for(path)

    def fetch() -> None:
        objects = Objects(address)
        content = objects.read(MANIFEST) or b""
        if _digest_of(content) != digest:
            raise StorageError(
                f"`{address}` is not the checkpoint that process 0 has in `{path}`, and "
                f"{socket.gethostname()} needs it. See to the address, or remove that folder."
            )
        manifest, first = Manifest.decode(content, path), world.rank - world.local_rank
        later = set[str]()
        if sharded is not None and manifest.world_size == world.size:
            others = {*range(world.size)} - {*range(first, first + world.local_size)}
            of_others = [name for name in manifest.sizes() if owner_of(name) in others]
            later = {name for name in of_others if sharded or is_of_one_process(name)}
        for name in manifest.sizes().keys() - later:
            bring(name)
        with blamed_on(address):
            Checkpoint(scratch, manifest, frozenset(later)).verify_rest()
        files.write_file(scratch / MANIFEST, [content])

    def bring(name: str) -> None:
        target = scratch / name
        if not target.exists():
            part = target.with_name(f".{name}.{os.getpid()}")
            with suppress(FileNotFoundError):  # whoever reads it says that it is missing
                Objects(address).fetch(name, part)
                part.rename(target)

    def begin() -> None:
        if receives:
            if scratch.exists():  # of a program that was killed
                files.remove_tree(scratch)
            files.make_directories(scratch)
            if address:
                fetch()

    run_on_main(processes, upload)
    try:
        run_on_all(processes, begin)
        if not address:
            _send(processes, path, scratch if receives else None)
        yield (scratch, bring) if lacks else (folder, None)
    finally:
        processes.barrier()  # all have read it
        if receives and scratch.exists():
            files.remove_tree(scratch)


def _send(processes: Processes, source: Path, target: Path | None) -> None:
    """Send the files in a folder of process 0, which all receive and write where `target` says."""
    for name in run_on_main(processes, lambda: sorted(os.listdir(source))):
        begin = 0
        while piece := run_on_main(processes, partial(_piece, source / name, begin)):
            begin += len(piece)
            if target is not None:
                with (target / name).open("ab") as file:
                    file.write(piece)


def _piece(path: Path, begin: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(_PIECE)


def _digest(folder: Path) -> str:
    """Return what tells a checkpoint from all others; "" where there is none."""
    with suppress(OSError):
        return _digest_of((folder / MANIFEST).read_bytes())
    return ""


def _digest_of(manifest: bytes) -> str:
    return blake2b(manifest, digest_size=16).hexdigest()
