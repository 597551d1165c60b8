"""The names that parts, files and folders of a checkpoint may have (rule 25)."""

import re
from collections.abc import Collection, Iterable

CHECKPOINTS = "checkpoints"  # the folder in a run's directory with those to resume from
WEIGHTS = "weights"  # that with those of the best weights alone
MANIFEST = "manifest.json"
PINS = "pins.json"
PACK = "processes.bin"
TENSOR_SUFFIX = ".safetensors"
JSON_SUFFIX = ".json"
TEMPORARY = ".tmp-"
TRASH = ".trash-"

_ALLOWED = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,127}", re.ASCII)
_OWNED = re.compile(r"(?:process-|.*-shard-)(\d{5,9})", re.ASCII)
_LONGEST_PART = 128 - len(TENSOR_SUFFIX)


def is_allowed(name: str) -> bool:
    """Return whether a file in a checkpoint may have this name."""
    return _ALLOWED.fullmatch(name) is not None


def why_refused(part: object) -> str | None:
    """Return what is wrong with the name of a part, or None."""
    if not isinstance(part, str):
        return "is no text"
    if len(part) > _LONGEST_PART:
        return f"has {len(part)} characters, but at most {_LONGEST_PART} fit"
    if not is_allowed(part):
        return "may only have letters, digits and `._=-`, and no dot in front"
    if part.lower() == "manifest":
        return "is taken by the list of files"
    return None


def part_of(file: str) -> str:
    """Return the part whose file has this name; the name itself if no part's file has it."""
    return file.removesuffix(TENSOR_SUFFIX if file.endswith(TENSOR_SUFFIX) else JSON_SUFFIX)


def process_part(rank: int) -> str:
    """Return the part that a process writes for itself."""
    return f"process-{rank:05d}"


def is_of_one_process(file: str) -> bool:
    """Return whether a file, by its name, is of a part that a process writes for itself."""
    owner = owner_of(file)
    return owner is not None and part_of(file) == process_part(owner)


def owner_of(file: str) -> int | None:
    """Return which process wrote a file, by its name; None for what all have alike."""
    match = _OWNED.fullmatch(part_of(file))
    return None if match is None else int(match[1])


def tensor_name(keys: Iterable[object], taken: Collection[str]) -> str:
    """Return a name, not yet taken, for the tensor at a place in a state."""
    name = ".".join(str(key) for key in keys)
    is_unicode = not any("\ud800" <= letter <= "\udfff" for letter in name)
    if not 0 < len(name) <= 512 or name == "__metadata__" or not is_unicode:
        name = f"tensor-{len(taken)}"
    free, number = name, 1
    while free in taken:
        free, number = f"{name}#{number}", number + 1
    return free


def folder_name(step: int, revision: int) -> str:
    """Return the name of the folder of a step; `revision` counts earlier saves of that step."""
    return f"step-{step:08d}" + (f".{revision}" if revision else "")
