"""Read tensors, or regions of them, out of the files of a checkpoint; no torch needed."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from trainkit.checkpoint.format import tensor_file
from trainkit.checkpoint.format.manifest import FileInfo, open_listed
from trainkit.checkpoint.format.names import TENSOR_SUFFIX, owner_of
from trainkit.checkpoint.format.shard_region import ShardRegion, runs
from trainkit.checkpoint.format.tensor_file import SIZES, Header
from trainkit.checkpoint.format.tensor_location import StoredTensor
from trainkit.checkpoint.io.reading import HashedFile, broken

__all__ = ["ReadJob", "TensorReader"]

ReadJob = tuple[StoredTensor, ShardRegion, memoryview]
"""A region of a tensor, and the memory that it is to fill, row by row."""

_Stretch = tuple[int, memoryview]
"""The first byte in a file, and what the bytes from there on fill."""


class TensorReader:
    """Reads from the tensor files of one checkpoint.

    Args:
        directory: The open folder.
        path: Its path, for errors.
        files: What the manifest says of the files.
        headers: Those that are known already, by part; others are added.
        verified: The names of files that were compared with their digests; others are added.
        left_out: The names of files that other processes compare; of them those that all read
            are not compared here.
    """

    def __init__(
        self,
        directory: int,
        path: Path,
        files: Mapping[str, FileInfo],
        headers: dict[str, Header],
        verified: set[str],
        left_out: Collection[str] = (),
    ) -> None:
        self._directory = directory
        self._path = path
        self._files = files
        self._headers = headers
        self._verified = verified
        self._left_out = left_out

    def header(self, part: str) -> Header:
        """Return what the tensor file of a part says of itself."""
        if part not in self._headers:
            self._check_is_listed(part)
            name = part + TENSOR_SUFFIX
            with self._open(name) as file:
                self._headers[part] = tensor_file.read_header(file)
        return self._headers[part]

    def read_whole(self, name: str) -> bytes:
        """Return the content of a file after it was hashed."""
        with self._open(name) as file:
            content = file.read(file.size)
            file.check_digest(self._files[name].xxh3_128)
        self._verified.add(name)
        return content

    def of_part(self, part: str) -> dict[str, StoredTensor]:
        """Return the tensors in the file of a part, in the order of its header."""
        return {
            name: StoredTensor(
                name, info.dtype, info.shape, ((part, ShardRegion.whole(info.shape)),), info.strides
            )
            for name, info in self.header(part).tensors.items()
        }

    def check(self, stored: StoredTensor, region: ShardRegion) -> None:
        """Compare a region of a tensor with the headers of the files that hold it.

        Without it, nothing says that a tensor is no larger than its files.
        """
        for part, shard in stored.shards:
            self._check_is_listed(part)
            if shard.common(region) is None:
                continue
            info = self.header(part).tensors.get(stored.name)
            if info is None or (info.dtype, info.shape) != (stored.dtype, shard.sizes):
                found = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
                file = part + TENSOR_SUFFIX
                wanted = f"{stored.dtype} {list(shard.sizes)}"
                why = f": `{stored.name}` {found}, but {wanted} is expected"
                raise broken(self._path, file, why)

    def read(self, jobs: Iterable[ReadJob], *, hashed: bool = True) -> None:
        """Fill the memory of each job, whose region has been checked; nothing else is kept.

        Args:
            hashed: Read each file that is needed to its end, and compare its digest with the
                manifest: what fills the memory is what was hashed. Else, and of files that are
                left to other processes, only what is needed.
        """
        stretches: dict[str, list[_Stretch]] = {}
        for stored, region, target in jobs:
            for part, shard in stored.shards:
                if shard.common(region) is None:
                    continue
                found = self._stretches(stored, part, runs(shard, region), target)
                stretches.setdefault(part, []).extend(found)
        for part, of_part in stretches.items():
            name = part + TENSOR_SUFFIX
            left = sorted(of_part, key=lambda stretch: stretch[0])
            while left:
                with self._open(name) as file:
                    if not hashed or (name in self._left_out and owner_of(name) is None):
                        for begin, target in left:
                            file.read_at(begin, target)
                        left = []
                    else:
                        left = _fill(left, file)
                        file.skip_rest().check_digest(self._files[name].xxh3_128)
                        self._verified.add(name)

    def _open(self, name: str) -> AbstractContextManager[HashedFile]:
        return open_listed(self._directory, name, self._path, self._files[name])

    def _check_is_listed(self, part: str) -> None:
        name = part + TENSOR_SUFFIX
        if name not in self._files:
            raise broken(self._path, name, " is missing")

    def _stretches(
        self,
        stored: StoredTensor,
        part: str,
        common: Iterable[tuple[int, int, int]],
        target: memoryview,
    ) -> list[_Stretch]:
        header, size = self.header(part), SIZES[stored.dtype]
        first = header.size + header.tensors[stored.name].begin
        return [
            (first + source * size, target[place * size : (place + length) * size])
            for source, place, length in common
        ]


def _fill(stretches: list[_Stretch], file: HashedFile) -> list[_Stretch]:
    """Read a file from its beginning; return the stretches that need it once more."""
    place, again = 0, []
    for begin, target in stretches:
        if begin < place:  # the same bytes are wanted twice
            again.append((begin, target))
            continue
        file.skip(begin - place)
        file.read_into(target)
        place = begin + len(target)
    return again
