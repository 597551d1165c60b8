"""A checkpoint to be read, and its verification."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.format import strict_json
from trainkit.checkpoint.format.manifest import Manifest, read_manifest, read_manifest_in
from trainkit.checkpoint.format.names import JSON_SUFFIX, MANIFEST, TENSOR_SUFFIX, owner_of, part_of
from trainkit.checkpoint.format.tensor_location import StoredTensor
from trainkit.checkpoint.forms import Unfit
from trainkit.checkpoint.io.reading import broken, names_in, open_directory, open_file
from trainkit.checkpoint.resharding.tensor_reader import (
    PartReader,
    TensorReader,
    flat_items,
    stored_in,
    tree_of,
)
from trainkit.containers.json_form import MALFORMED
from trainkit.errors import CheckpointError

if TYPE_CHECKING:
    from trainkit.distributed.world import World


class Checkpoint:
    """A checkpoint whose manifest is whole, and whose files have the names and sizes in it.

    Every file that is read is compared with its digest in the manifest. Read all parts, and call
    `verify_rest`, before any of them is applied: then every byte of it is known to be good.

    Args:
        path: Its folder.
        manifest: What is in it.
        left_out: Files that other processes compare; nobody may apply any before all have.
        bring: As for `TensorReader`.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        left_out: frozenset[str] = frozenset(),
        bring: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self._reader = TensorReader(path, manifest.files, left_out, bring)
        self._flat: dict[str, tuple[Mapping[str, Any], Mapping[str, StoredTensor]]] = {}

    @property
    def step(self) -> int:
        """Updates applied when it was made."""
        return self.manifest.step

    def names(self) -> list[str]:
        """Return the names of the parts."""
        return sorted({part_of(file) for file in self.manifest.files})

    def read(self, part: str, like: Any = None) -> Any:
        """Return the state of a part; tensors are on the CPU, each in memory of its own.

        The state is made of the very bytes whose digest is compared with the manifest, but for
        files whose digest another process of this machine compares.

        Args:
            part: Its name.
            like: A state of the same form, or what there is of it. In the place of each
                `DTensor` in it the same is returned, and no more of it read than this process
                holds. One in the place of a dict or list stands for all tensors of its shape in
                there. All others are put together from their shards.
        """
        tree, own = self._tree(part)
        with self.blaming(part, MALFORMED):
            return PartReader(self._reader, own).read(tree, like)

    def verify_rest(self) -> None:
        """Compare what has not been read, and is not left to others, with the manifest."""
        self._reader.verify_rest()

    def layout(self, part: str, others: list[str] | None = None) -> dict[str, StoredTensor]:
        """Return where the tensors of a flat part are, in its order; tied ones are equal.

        `others` takes the names of what is no tensor, which is an error without it.
        """
        nodes, own = self._nodes(part)
        with self.blaming(part, MALFORMED):
            values = {name: stored_in(nodes[name], own) for name in nodes}
        tensors = {name: stored for name, stored in values.items() if stored is not None}
        rest = [name for name in values if name not in tensors]
        if others is not None and tensors:
            others += rest
        elif rest:
            raise CheckpointError(
                f"{rest[0]!r} in the part {part!r} of `{self.path}` is no tensor. Read such "
                "parts by `read`.",
                path=self.path,
            )
        return tensors

    def read_tensor(self, part: str, name: str) -> Any:
        """Return one tensor of a flat part, whole; no other is held in memory.

        Its digest is not compared again: that would need the whole file for each tensor.
        """
        nodes, own = self._nodes(part)
        if name not in nodes:
            raise CheckpointError(
                f"The part {part!r} of `{self.path}` has no tensor {name!r}.", path=self.path
            )
        with self.blaming(part, MALFORMED):
            return PartReader(self._reader, own).read(nodes[name], None, hashed=False)

    @contextmanager
    def blaming(
        self, part: str | None, kinds: tuple[type[Exception], ...] = (Unfit,)
    ) -> Iterator[None]:
        """Turn what a part of a wrong form raises into an error on its file.

        Args:
            part: None: the manifest.
            kinds: What is raised there; of others nothing says that the file is to blame.
        """
        try:
            yield
        except CheckpointError:
            raise
        except kinds as error:
            self.verify_rest()  # if a file has changed, it is the one to blame
            names = [MANIFEST] if part is None else [part + JSON_SUFFIX, part + TENSOR_SUFFIX]
            file = next((name for name in names if name in self.manifest.files), names[0])
            why = f"{error}. Nothing of it was applied"
            if not isinstance(error, Unfit):
                why = f"trainkit did not write it so: {error}"
            raise broken(self.path, file, f": {why}") from error

    def _tree(self, part: str) -> tuple[Any, dict[str, StoredTensor]]:
        """Return the JSON of a part, and the tensors in its own file."""
        files = self.manifest.files
        tensor_name, tree_name = part + TENSOR_SUFFIX, part + JSON_SUFFIX
        if tensor_name not in files and tree_name not in files:
            raise CheckpointError(
                f"The checkpoint `{self.path}` has no part {part!r}, only {self.names()}.",
                path=self.path,
            )
        own = self._reader.of_part(part) if tensor_name in files else {}
        if tree_name not in files:
            return tree_of(self._reader.header(part)), own
        with self.blaming(part, MALFORMED):
            return strict_json.parse(self._reader.read_whole(tree_name)), own

    def _nodes(self, part: str) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
        if part not in self._flat:
            tree, own = self._tree(part)
            with self.blaming(part, MALFORMED):
                self._flat[part] = flat_items(tree), own
        return self._flat[part]


def verify(path: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest, which is returned."""
    checkpoint = Checkpoint(path, check_sizes(path))
    checkpoint.verify_rest()
    return checkpoint.manifest


def open_share(
    path: Path, world: "World", bring: Callable[[str], None] | None = None
) -> Checkpoint:
    """Return a checkpoint that all processes of a job read and verify together.

    Each compares what was written by the process of its own number. What all have alike, all read:
    on each machine its processes share out who compares it. Process 0 looks at names and sizes.
    """
    manifest = check_sizes(path) if world.is_main else read_manifest(path)
    files = manifest.files
    owned = {name: owner for name in files if (owner := owner_of(name)) is not None}
    common = sorted(files.keys() - owned, key=lambda name: (-files[name].bytes, name))
    mine = {name for name, owner in owned.items() if owner % world.size == world.rank}
    # Of every `sharers` neighbours each takes other files: those of a machine, where the numbers of
    # the starter can be true. Whatever they are, number i is taken by process i modulo the size.
    is_even = world.size % world.local_size == 0
    sharers = world.local_size if is_even else world.size
    mine.update(common[world.rank % sharers :: sharers])
    return Checkpoint(path, manifest, frozenset(files.keys() - mine), bring)


def check_sizes(path: Path) -> Manifest:
    """Compare names and sizes, but not contents, with the manifest, which is returned."""
    with open_directory(path) as directory:
        manifest = read_manifest_in(directory, path)
        present, sizes = set(names_in(directory)) - {MANIFEST}, manifest.sizes()
        for name in sorted(present ^ sizes.keys()):
            why = " is missing" if name in sizes else " does not belong to it"
            raise broken(path, name, why)
        for name, size in sizes.items():
            with open_file(directory, name, path) as file:
                file.check_size(size)
    return manifest
