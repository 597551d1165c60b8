"""Addresses of storage: which folder of this machine is that of one, and what is in it."""

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainkit.basics.lock import RunLock
from trainkit.basics.outputs import address_of, storage_folder
from trainkit.basics.packages import require
from trainkit.errors import CheckpointError, ConfigError
from trainkit.storage.copies import Remote, checkpoints_in, files_in
from trainkit.storage.lease import Lease
from trainkit.storage.objects import Objects, StorageError

_ADDRESS = re.compile(r"(s3|gs|az):/{1,2}([^/]+(?:/[^/]+)*)/?")  # `Path` makes one slash of two
_RUN = re.compile(r"\d{4}-\d\d-\d\d_\d+", re.ASCII)


def folder_of(address: str, argument: str) -> Path:
    """Return the folder of this machine that is mirrored to an address; nothing is made."""
    if address.startswith("hf:/"):
        raise ConfigError(
            f"`{argument}` is `{address}`, but under such addresses Hugging Face writes without "
            "conditions: nothing would keep two runs apart. Its buckets speak S3 as well, with "
            "conditions: pass `s3://bucket/run`, set `AWS_ENDPOINT_URL` to "
            "`https://s3.hf.co/NAMESPACE`, and the keys to those that a token gives for S3. "
            "trainkit was not tried there. Repositories are for finished models, not for runs."
        )
    match = _ADDRESS.fullmatch(address)
    parts = match[2].split("/") if match else []
    if match is None or any(part.startswith(".") for part in parts):
        raise ConfigError(
            f"`{argument}` is `{address}`, but addresses of storages look like `s3://bucket/run`, "
            "`gs://bucket/run` or `az://container/run`, without names that begin with a dot. Of "
            "other storages, mount or copy a folder, and pass that."
        )
    require("obstore", f"`{argument}={address!r}`", ", or pass a folder")
    return storage_folder().joinpath(match[1], *parts)


def fetch(folder: Path) -> None:
    """Bring to the folder of an address what it lacks; call it on one process.

    What is broken there is said, and left out.

    Raises:
        CheckpointError: The address cannot be reached, or holds another training.
    """
    remote = Remote(_objects(folder))
    remote.check_runs(folder)
    for name, _ in remote.newest_first():
        try:
            if not (folder / name).exists():
                remote.fetch(name, folder)
        except StorageError:
            raise
        except CheckpointError as error:
            warnings.warn(f"Left out: {error}", stacklevel=2)
    remote.fetch_others(folder, replaces=False)


def outline(folder: Path, target: Path, *, logs: bool) -> Remote:
    """Let a folder look like what the address of another one holds; see `Remote.outline`."""
    remote = Remote(_objects(folder))
    remote.outline(target, logs=logs)
    if not target.exists():
        raise CheckpointError(f"`{remote.objects.address}` holds nothing. See to the address.")
    return remote


def fetch_names(folder: Path) -> None:
    """Make the folders of the runs that the address of a folder holds, empty where they are new."""
    objects = _objects(folder)
    runs = [name for name in objects.folders() if _RUN.fullmatch(name)]
    for name in runs:
        (folder / name).mkdir(parents=True, exist_ok=True)


def send_files(folder: Path, names: Iterable[str], gone: Iterable[str]) -> None:
    """Upload files of a folder in their order, then remove others; call it on one process.

    Raises:
        CheckpointError: The address cannot be reached.
    """
    objects = _objects(folder)
    for name in names:
        objects.put_file(name, folder / name)
    objects.delete(gone)


def send_state(folder: Path) -> None:
    """Upload a folder with a checkpoint, whose earlier ones go; call it on one process.

    A storage that cannot be reached is said: the folder holds the checkpoint in any case.
    """
    try:
        with writing(folder) as lease:
            remote, here = Remote(_objects(folder)), checkpoints_in(folder)
            for name in here.keys() - remote.checkpoints.keys():
                remote.send(name, folder, lease.require)
            earlier = {*remote.checkpoints, *remote.left} - here.keys()
            for name in sorted(name for name in earlier if "/" not in name):
                lease.require()
                remote.remove(name)
    except CheckpointError as error:
        warnings.warn(f"`{folder}` is not uploaded: {error} The state is in it.", stacklevel=2)


def send_logs(folder: Path) -> None:
    """Upload what is of no checkpoint, if a folder has an address; call it on one process."""
    if address_of(folder) is not None:
        try:
            send_files(folder, files_in(folder), ())
        except StorageError as error:
            warnings.warn(f"The logs in `{folder}` are not uploaded: {error}", stacklevel=2)


def forget(folder: Path) -> None:
    """Remove what the address of a folder holds that was removed; call it on one process."""
    objects = _objects(folder)
    with suppress(StorageError):  # it is older than others in any case
        objects.delete(sorted(objects.names()))


@contextmanager
def writing(folder: Path) -> Iterator[Lease]:
    """Hold a folder and its address inside."""
    # Whoever has the folder may take its address from a run that has it: none must be alive.
    with RunLock(folder, advice="stop it"):
        lease = Lease(_objects(folder), folder)
        lease.acquire(lambda line: None)
        try:
            yield lease
        finally:
            lease.release()


def _objects(folder: Path) -> Objects:
    address = address_of(folder)
    assert address is not None
    return Objects(address)
