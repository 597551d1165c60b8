"""Find out, before it matters, whether all machines see one folder."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from trainkit.distributed.collectives import raise_on_all, run_on_main
from trainkit.distributed.processes import Processes
from trainkit.errors import ConfigError

_SECONDS = 20.0  # in which a file shows on other machines: network storage asks now and then
_PAUSE = 0.2


def check_shared(processes: Processes, folder: Path, owner: str) -> None:
    """Raise, on all processes, where a machine does not see what process 0 writes into a folder.

    Every process must call it. One process of each other machine reads a file, which goes again.

    Raises:
        ConfigError: Machines have folders of their own; names the first one, and what to do.
    """
    world = processes.world
    if world.size == world.local_size:
        return
    probe = folder / f".trainkit-shared-{os.urandom(6).hex()}"
    name = run_on_main(processes, lambda: (probe.write_text(probe.name), probe.name)[1])
    failure: ConfigError | None = None
    if world.is_local_main and not _shows(folder / name):
        failure = ConfigError(
            f"{owner} is `{folder}`, but {socket.gethostname()} does not see there what process 0 "
            "has written: it must be on storage that all machines share. Give a folder on such "
            "storage, or mount it under the same path everywhere."
        )
    try:
        raise_on_all(processes, failure)
    finally:
        if processes.is_main:
            probe.unlink(missing_ok=True)


def _shows(probe: Path) -> bool:
    """Return whether a file with its own name in it is there, or comes in time."""
    end = time.monotonic() + _SECONDS
    while True:
        with suppress(OSError):
            os.listdir(probe.parent)  # lets network storage ask again
            if probe.read_text() == probe.name:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
