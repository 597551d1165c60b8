"""Plan the files of the parts that one process writes, and write them with their digests."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainkit.checkpoint.format import codec, strict_json, tensor_file
from trainkit.checkpoint.format.manifest import FileInfo
from trainkit.checkpoint.format.names import (
    JSON_SUFFIX,
    PACK,
    TENSOR_SUFFIX,
    is_of_one_process,
    why_refused,
)
from trainkit.checkpoint.io import files
from trainkit.checkpoint.io.digests import xxh3_128, xxh3_128_hexdigest
from trainkit.errors import CheckpointError

__all__ = ["PlannedFile", "Written", "check_unique", "pack", "plan", "sent", "write"]

_SENT = 1 << 16  # bytes; process 0 holds those of all processes

Written = tuple[str, int, str]
"""Name, bytes and digest of a file."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that will be written."""

    name: str
    size: int  # bytes
    chunks: Callable[[], Iterable[bytes | memoryview]]  # returns its content, piece by piece
    version: int = 1  # the least of the format that has what is in it

    @property
    def is_sent(self) -> bool:
        """Whether process 0 writes it for the process that has it, if there are several."""
        return self.size <= _SENT and is_of_one_process(self.name)


def plan(parts: Mapping[str, Any]) -> list[PlannedFile]:
    """Return the files of some parts; tensors are copied when they are written, not before."""
    planned = []
    for name, state in parts.items():
        why = why_refused(name)
        if why is not None:
            raise CheckpointError(f"The part {name!r:.200} {why}. Give it another name.")
        planned += _plan_part(name, state)
    return planned


def _plan_part(name: str, state: Any) -> list[PlannedFile]:
    encoded = codec.encode(state, name)
    planned = []
    if encoded.pieces:
        metadata = {"format": "pt"}  # which readers of transformers ask for
        if encoded.is_plain:
            metadata["container"] = encoded.container
        header = tensor_file.encode_header(encoded.pieces, metadata)
        if len(header) > tensor_file.LARGEST_HEADER:
            raise CheckpointError(
                f"`{name}` has {len(encoded.pieces)} tensors, too many for one file. Split it "
                "into several parts, or stack its tensors."
            )
        size = len(header) + sum(piece.size for piece in encoded.pieces.values())
        chunks = partial(tensor_file.chunks, encoded.pieces, header)
        planned.append(PlannedFile(name + TENSOR_SUFFIX, size, chunks, encoded.version))
    if not encoded.is_plain:
        content = strict_json.dump(encoded.tree)
        if len(content) > strict_json.LARGEST:
            raise _too_large(name, len(content), encoded.tree)
        file = PlannedFile(name + JSON_SUFFIX, len(content), lambda: [content], encoded.version)
        planned.append(file)
    return planned


def _too_large(name: str, size: int, tree: Any) -> CheckpointError:
    inside = {}
    if type(tree) is dict:
        inside = {key: len(strict_json.dump(value)) for key, value in tree.items()}
    largest = max(inside, key=inside.__getitem__, default="")
    place = f", most of it in `{name}.{largest}`" if largest else ""
    return CheckpointError(
        f"`{name}` makes {size} bytes of JSON{place}, but at most {strict_json.LARGEST} are "
        "allowed. Store large numbers of values as tensors or arrays."
    )


def sent(planned: Sequence[PlannedFile]) -> dict[str, bytes]:
    """Return the content of those files that process 0 writes for this process, by name."""
    return {file.name: b"".join(file.chunks()) for file in planned if file.is_sent}


def pack(contents: Mapping[str, bytes]) -> tuple[PlannedFile, dict[str, FileInfo]]:
    """Return the file that holds small ones of many processes, and where each is in there."""
    infos: dict[str, FileInfo] = {}
    size = 0
    for name, content in sorted(contents.items()):
        digest = xxh3_128_hexdigest(content)
        infos[name] = FileInfo(bytes=len(content), xxh3_128=digest, pack=PACK, begin=size)
        size += len(content)
    return PlannedFile(PACK, size, lambda: [contents[name] for name in infos], version=4), infos


def check_unique(names: Iterable[Iterable[str]]) -> None:
    """Check the names of the files of each process."""
    owners: dict[str, int] = {}
    for rank, mine in enumerate(names):
        for name in mine:
            other = owners.setdefault(name.lower(), rank)
            if other != rank or sum(name.lower() == one.lower() for one in mine) > 1:
                raise CheckpointError(
                    f"The file `{name}` is written twice, by process {other} and by process "
                    f"{rank}. Give their parts names that differ in more than case."
                )


def write(planned: Iterable[PlannedFile], folder: Path) -> list[Written]:
    """Write files into a folder and return what they must be, once they survive a power cut.

    Raises:
        CheckpointError: A tensor has changed its size since `plan`.
        OSError: Writing failed.
    """
    hashed = [_Hashed(file) for file in planned]
    files.write_files((folder / one.file.name, one.chunks()) for one in hashed)
    return [(one.file.name, one.size, one.digest.hexdigest()) for one in hashed]


class _Hashed:
    """A file that is hashed and counted while it is written."""

    def __init__(self, file: PlannedFile) -> None:
        self.file = file
        self.size = 0
        self.digest = xxh3_128()

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield what is to be written, piece by piece."""
        for chunk in self.file.chunks():
            self.digest.update(chunk)
            self.size += len(chunk)
            yield chunk
        if self.size != self.file.size:
            raise CheckpointError(
                f"`{self.file.name}` should have {self.file.size} bytes, but {self.size} were "
                "written: a tensor has been changed while it was being saved. Save at the end of "
                "a step."
            )
