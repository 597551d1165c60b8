"""Read the state of a part, or regions of its tensors, out of the files of a checkpoint.

Torch is imported only where a state is put together.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.format import tensor_file
from trainkit.checkpoint.format.codec import decode
from trainkit.checkpoint.format.manifest import FileInfo
from trainkit.checkpoint.format.names import TENSOR_SUFFIX, owner_of
from trainkit.checkpoint.format.tensor_file import SIZES, Header
from trainkit.checkpoint.format.tensor_location import ShardRegion, StoredTensor, runs
from trainkit.checkpoint.format.tensors import empty, with_strides
from trainkit.checkpoint.io.reading import HashedFile, broken, open_directory, open_file
from trainkit.checkpoint.resharding.sharding_spec import ShardingSpec, is_sharded

if TYPE_CHECKING:
    from torch import Tensor

ReadJob = tuple[StoredTensor, ShardRegion, memoryview]
"""A region of a tensor, and the memory that it is to fill, row by row."""

_Stretch = tuple[int, memoryview]
"""The first byte in a file, and what the bytes from there on fill."""


class TensorReader:
    """Reads the files of one checkpoint.

    Args:
        files: What the manifest says of the files.
        left_out: The names of files that other processes compare; of them those that all read
            are not compared here.
        bring: Called with the name of each file before it is opened; it may not be there yet.

    Attributes:
        verified: The names of files that were compared with their digests.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[str, FileInfo],
        left_out: Collection[str] = (),
        bring: Callable[[str], None] | None = None,
    ) -> None:
        self.verified: set[str] = set()
        self._path = path
        self._files = files
        self._headers: dict[str, Header] = {}
        self._left_out = left_out
        self._bring = bring

    def header(self, part: str) -> Header:
        """Return what the tensor file of a part says of itself."""
        if part not in self._headers:
            self._check_is_listed(part)
            with self._open(part + TENSOR_SUFFIX) as file:
                self._headers[part] = tensor_file.read_header(file)
        return self._headers[part]

    def read_whole(self, name: str) -> bytes:
        """Return the content of a file after it was hashed."""
        with self._open(name) as file:
            content = file.read(file.size)
            file.check_digest(self._files[name].xxh3_128)
        self.verified.add(name)
        return content

    def verify_rest(self) -> None:
        """Compare what has not been read, and is not left to others, with the manifest."""
        for name in [name for name in self._files if name not in self.verified | {*self._left_out}]:
            with self._open(name) as file:
                file.skip_rest().check_digest(self._files[name].xxh3_128)
            self.verified.add(name)

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
                actual = "is missing" if info is None else f"is {info.dtype} {list(info.shape)}"
                file = part + TENSOR_SUFFIX
                wanted = f"{stored.dtype} {list(shard.sizes)}"
                why = f": `{stored.name}` {actual}, but {wanted} is expected"
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
                header, size = self.header(part), SIZES[stored.dtype]
                first = header.size + header.tensors[stored.name].begin
                stretches.setdefault(part, []).extend(
                    (first + source * size, target[begin * size : (begin + length) * size])
                    for source, begin, length in runs(shard, region)
                )
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
                        self.verified.add(name)

    @contextmanager
    def _open(self, name: str) -> Iterator[HashedFile]:
        info = self._files[name]
        if self._bring is not None:
            self._bring(info.pack or name)
        with (
            open_directory(self._path) as directory,
            open_file(directory, info.pack or name, self._path) as file,
        ):
            if info.pack is not None:
                file.narrow(name, info.begin, info.bytes)
            file.check_size(info.bytes)
            yield file

    def _check_is_listed(self, part: str) -> None:
        name = part + TENSOR_SUFFIX
        if name not in self._files:
            raise broken(self._path, name, " is missing")


def _fill(stretches: list[_Stretch], file: HashedFile) -> list[_Stretch]:
    """Read a file from its beginning; return the stretches that need it once more."""
    position, again = 0, []
    for begin, target in stretches:
        if begin < position:  # the same bytes are wanted twice
            again.append((begin, target))
            continue
        file.skip(begin - position)
        file.read_into(target)
        position = begin + len(target)
    return again


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor to be read: as it lies over the processes now, or the whole of it."""

    stored: StoredTensor
    spec: ShardingSpec | None

    @property
    def region(self) -> ShardRegion:
        """Return what this process needs of it."""
        return ShardRegion.whole(self.stored.shape) if self.spec is None else self.spec.region()

    def finished(self, target: "Tensor") -> "Tensor":
        """Return the tensor, from what was read of it row by row."""
        if self.spec is not None:
            return self.spec.wrap(target)
        strides = self.stored.strides
        return target if strides is None else with_strides(target, strides)


def tree_of(header: Header) -> Any:
    """Return the tree of a part that has none of its own: a flat dict of tensors."""
    pairs = [[name, {"$tensor": name}] for name in header.tensors]
    is_ordered = header.metadata.get("container") == OrderedDict.__name__
    return {"$ordered": {"$dict": pairs}} if is_ordered else {"$dict": pairs}


def flat_items(tree: Any) -> dict[str, Any]:
    """Return the nodes in the outermost dict of a tree by their names; empty if it is none."""
    content: Any = tree.get("$ordered", tree) if type(tree) is dict else {}
    return dict(content.get("$dict", content))


def stored_in(node: Any, own: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the tensor of a node, None if it is none; `own` are those in the part's file.

    Of a view, which has no place of its own, only dtype and shape are told.
    """
    if type(node) is not dict or len(node) != 1:
        return None
    ((tag, content),) = node.items()
    if tag == "$tensor":
        return own[content]
    if tag == "$view":
        base, shape = own[content[0]], tuple(content[1])
        return StoredTensor(f"{base.name} {content[1:]}", base.dtype, shape, ())
    return StoredTensor.parse(content) if tag == "$sharded" else None


class PartReader:
    """Reads one part: first decides what is needed of each tensor, then reads all at once.

    Args:
        reader: Reads from the tensor files of the checkpoint.
        own: The tensors in the part's own file.
    """

    def __init__(self, reader: TensorReader, own: Mapping[str, StoredTensor]) -> None:
        self._reader = reader
        self._own = own
        self._wanted: dict[_Wanted, None] = {}  # in order, each once
        self._named: dict[str, _Wanted] = {}  # by the names in nodes that stay as they are
        self._cuts: list[tuple[Any, ShardingSpec]] = []

    def read(self, tree: Any, like: Any, *, hashed: bool = True) -> Any:
        """Return the state.

        Args:
            tree: The JSON of the part, or a node of it.
            like: A state of the same form; where it holds a `DTensor`, the same is returned, of
                which only what this process holds is read. A `DTensor` in the place of a dict or
                list stands for all tensors of its shape in there.
            hashed: As in `TensorReader.read`.

        Raises:
            CheckpointCorrupt: A file has changed, or is not of the form that trainkit writes.
            Exception: One of `json_form.MALFORMED`: `tree` is not of that form.
        """
        from trainkit.basics.device import memory_of  # which imports torch

        resolved = self._resolve(tree, like)
        for wanted in self._wanted:
            self._reader.check(wanted.stored, wanted.region)
        targets = {
            wanted: empty(wanted.stored.dtype, wanted.region.sizes) for wanted in self._wanted
        }
        self._reader.read(
            (
                (wanted.stored, wanted.region, memory_of(target))
                for wanted, target in targets.items()
            ),
            hashed=hashed,
        )
        # One after the other: what lies in another order is held twice for a moment.
        tensors: dict[Any, Tensor] = {
            wanted: wanted.finished(targets.pop(wanted)) for wanted in self._wanted
        }
        tensors |= {name: tensors[wanted] for name, wanted in self._named.items()}
        for index, (node, spec) in enumerate(self._cuts):
            tensors[index] = spec.cut(decode(node, tensors))
        return decode(resolved, tensors)

    def _resolve(self, node: Any, like: Any) -> Any:
        """Return a node in which tensors are named by what is wanted of them."""
        if type(node) is list:
            return [self._resolve(item, _inside(like, index)) for index, item in enumerate(node)]
        if type(node) is not dict:
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self._resolve(value, _inside(like, key)) for key, value in node.items()}
        return self._resolve_type(tag, node, like)

    def _resolve_type(self, tag: str, node: dict[str, Any], like: Any) -> Any:
        if len(node) != 1:
            raise ValueError(f"an object with {tag!r} has other keys")
        content = node[tag]
        if tag == "$tensor":
            return self._want(self._own[content], like)
        if tag == "$sharded":
            return self._want(StoredTensor.parse(content), like)
        if tag in ("$blob", "$raw", "$view"):
            return self._want_whole(node, content if tag == "$blob" else content[0], like)
        if tag in ("$ordered", "$tuple"):
            return {**node, tag: self._resolve(content, like)}
        if tag == "$dict":
            pairs = [[k, self._resolve(v, _inside(like, decode(k, {})))] for k, v in content]
            return {**node, tag: pairs}
        return {**node, tag: self._resolve(content, None)}

    def _want(self, stored: StoredTensor, like: Any) -> Any:
        fits = is_sharded(like) and tuple(like.shape) == stored.shape
        wanted = _Wanted(stored, ShardingSpec.of(like) if fits else None)
        self._wanted[wanted] = None
        return {"$tensor": wanted}

    def _want_whole(self, node: Any, name: str, like: Any) -> Any:
        """Want a tensor of which `node` shows another view, or none."""
        self._named[name] = wanted = _Wanted(self._own[name], None)
        self._wanted[wanted] = None
        shape = tuple(node["$view"][1]) if "$view" in node else ()
        if not is_sharded(like) or tuple(like.shape) != shape:
            return node
        self._cuts.append((node, ShardingSpec.of(like)))
        return {"$tensor": len(self._cuts) - 1}


def _inside(like: Any, key: Any) -> Any:
    """Return what a state holds under a key, None if nothing."""
    if is_sharded(like):
        return like
    if isinstance(like, Mapping):
        return like.get(key)
    is_item = isinstance(like, list | tuple) and type(key) is int and 0 <= key < len(like)
    return like[key] if is_item else None
