"""Where users let something be written: found once, and tried before it is needed."""

import os
import re
import time
from pathlib import Path

from trainkit.errors import CheckpointError, ConfigError
from trainkit.lazy import ask

# `Path` makes one slash of two: there only what is known of storages is an address.
_ADDRESS = re.compile(
    r"([a-z][a-z0-9+.-]+)://|(s3a?|gs|gcs|az|abfss?|wasbs?|adl|hf|hdfs|https?|file|memory):/", re.I
)
_RUN = re.compile(r"(\d{4}-\d\d-\d\d)_(\d+)", re.ASCII)  # the folder of one run of several


def absolute(path: object, argument: str, *, stored: bool = False) -> Path:
    """Return what a user gave as a path, so that a later change of the working directory is none.

    Args:
        stored: Whether it may be the address of a storage, such as `s3://bucket/run`: a folder of
            this machine is returned then, which the caller mirrors. `address_of` tells it.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"`{argument}` must be a path, but is {path!r}.")
    if address := _ADDRESS.match(os.fspath(path)):
        if "file" in address.groups():
            raise ConfigError(f"`{argument}` is `{path}`: write the path without `file://`.")
        if not stored:
            raise ConfigError(
                f"`{argument}` is `{path}`, which is the address of a storage, but nothing brings "
                "there what is written. Pass a folder; one in an `output_dir` that is an address "
                "is mirrored."
            )
        folder: Path = ask("folder_of")(os.fspath(path), argument)
        return folder
    given: str | os.PathLike[str] = path
    try:
        return Path(given).absolute()
    except FileNotFoundError:
        raise ConfigError(
            f"`{argument}` is the relative path `{path}`, but the working directory of this "
            "process does not exist any more. Pass an absolute path, or start the program in a "
            "folder that exists."
        ) from None


def is_address(path: str | Path) -> bool:
    """Return whether a path is the address of a storage."""
    return _ADDRESS.match(os.fspath(path)) is not None


def storage_folder() -> Path:
    """Return where the folders are that are mirrored to storages."""
    given = os.environ.get("TRAINKIT_STORAGE_DIR")
    return Path(given or Path.home() / ".cache" / "trainkit" / "storage").resolve()


def address_of(folder: Path) -> str | None:
    """Return the address that a folder is mirrored to, None for any other one."""
    parts = folder.parts[len(above := storage_folder().parts) :]
    is_inside = len(parts) > 1 and folder.parts[: len(above)] == above
    if not is_inside or any(part.startswith(".") for part in parts):  # what a dry run writes
        return None
    return f"{parts[0]}://{'/'.join(parts[1:])}"


def fetched(folder: Path) -> Path:
    """Return a folder; one that is mirrored to a storage after what it lacks was fetched."""
    if address_of(folder) is not None:
        ask("fetch")(folder)
    return folder


def check_folder(folder: Path, owner: str) -> None:
    """Make a folder, and try to write a file in it."""
    trial = folder / f".trainkit-trial-{os.urandom(6).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with trial.open("xb", buffering=0) as file:
                file.write(bytes(4096))  # a full disk may take a name, but no content
                os.fsync(file.fileno())
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        raise refusal(folder, owner, error) from error


def why(path: Path, error: OSError) -> str:
    """Return why `path` cannot be written to, in words."""
    if isinstance(error, IsADirectoryError):
        return f"`{path}` is a folder"
    in_the_way = isinstance(error, FileExistsError | FileNotFoundError | NotADirectoryError)
    for ancestor in (path, *path.parents) if in_the_way else ():
        if os.path.islink(ancestor) and not os.path.exists(ancestor):
            return f"`{ancestor}` is a link to `{os.readlink(ancestor)}`, which does not exist"
        if os.path.isfile(ancestor):
            return f"`{ancestor}` is a file, not a folder"
    return str(error)


def refusal(path: Path, owner: str, error: OSError) -> ConfigError:
    """Return the error of somebody who cannot write to `path`."""
    return ConfigError(
        f"{owner} writes to `{path}`, but cannot: {why(path, error)}. Choose another place, or "
        "make this one writable."
    )


def unwritable(directory: Path, error: OSError, advice: str) -> CheckpointError:
    """Return the error of a directory where nothing can be saved; `advice` is what else to do."""
    return CheckpointError(
        f"The directory `{directory}` cannot be written to: "
        f"{why(Path(error.filename or directory), error)}. {advice}, or make this one writable.",
        path=directory,
        errno=error.errno,
    )


def folder_of_run(parent: Path, resume: str | Path | None) -> Path:
    """Return the folder of a run among others in `parent`.

    Where `resume` is "auto" or "must" it is the newest, or `parent` itself where that holds
    checkpoints and no runs; else, or where "auto" finds none, a new one that nobody else gets, such
    as `2026-11-22_1`.

    Raises:
        CheckpointError: "must" finds none.
        ConfigError: A folder cannot be made; says why.
    """
    if address_of(parent) is not None:
        ask("fetch_names")(parent)
    matches = [_RUN.fullmatch(entry.name) for entry in parent.glob("*_*") if entry.is_dir()]
    runs = sorted((match[1], int(match[2]), match[0]) for match in matches if match)
    if resume in ("auto", "must"):
        if runs or any(parent.glob("checkpoints/step-*")):
            return parent / runs[-1][2] if runs else parent
        if resume == "must":
            raise CheckpointError(
                f'`resume="must"` was given, but `{parent}` holds no run. Use `resume="auto"` to '
                "begin one in this case.",
                path=parent,
            )
    # No name sorts before an older one, whatever the clock of this machine or its time zone says.
    day, number = time.strftime("%Y-%m-%d", time.gmtime()), 1
    if runs and runs[-1][0] >= day:
        day, number = runs[-1][0], runs[-1][1] + 1
    while True:
        folder = parent / f"{day}_{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run came first
            number += 1
        except OSError as error:
            raise refusal(folder, "`Trainer(output_dir=..., new_run=True)`", error) from error
