"""A checkpoint that has been verified, and the verification itself."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

from trainkit.checkpoint import decoding, strict_json, tensor_file, tensors
from trainkit.checkpoint.manifest import FileInfo, Manifest, read_manifest_in
from trainkit.checkpoint.names import JSON_SUFFIX, MANIFEST, TENSOR_SUFFIX, part_of
from trainkit.checkpoint.reading import HashedFile, names_in, open_directory, open_file
from trainkit.errors import CheckpointCorrupt, CheckpointError

__all__ = ["Checkpoint", "check_sizes", "verify"]


class Checkpoint:
    """A checkpoint whose files were all verified when it was opened.

    Read all parts before any of them is applied: a file can still change after it was verified,
    which `read` finds.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def step(self) -> int:
        """Updates applied when it was made."""
        return self.manifest.step

    def names(self) -> list[str]:
        """Return the names of the parts."""
        return sorted({part_of(file) for file in self.manifest.files})

    def read(self, part: str) -> Any:
        """Return the state of a part; tensors are on the CPU, each in memory of its own.

        The state is made of the very bytes whose digest is compared with the manifest.

        Raises:
            CheckpointCorrupt: A file has changed since the checkpoint was opened, or is not of
                the form that trainkit writes.
            CheckpointError: There is no such part.
        """
        files = self.manifest.files
        tensor_name, tree_name = part + TENSOR_SUFFIX, part + JSON_SUFFIX
        if tensor_name not in files and tree_name not in files:
            raise CheckpointError(
                f"The checkpoint `{self.path}` has no part {part!r}, only {self.names()}.",
                path=self.path,
            )
        found: dict[str, Any] = {}
        with open_directory(self.path) as directory:
            if tensor_name in files:
                with open_file(directory, tensor_name, self.path) as file:
                    found = _read_tensors(file, files[tensor_name])
            if tree_name not in files:
                return found
            with open_file(directory, tree_name, self.path) as file:
                return _read_tree(file, files[tree_name], found)


def verify(path: Path) -> Manifest:
    """Read every file of a checkpoint and compare it with the manifest, which is returned.

    Raises:
        CheckpointCorrupt: A file is missing, added, cut, changed, exchanged or a link; the
            message names it.
        CheckpointError: A newer version of the format.
    """
    with open_directory(path) as directory:
        manifest = _check_names(directory, path)
        for name, info in manifest.files.items():
            with open_file(directory, name, path) as file:
                _check_size(file, info)
                _check_digest(file.skip_rest(), info)
    return manifest


def check_sizes(path: Path) -> Manifest:
    """Compare names and sizes, but not contents, with the manifest, which is returned.

    Raises:
        CheckpointError: As `verify` does.
    """
    with open_directory(path) as directory:
        manifest = _check_names(directory, path)
        for name, info in manifest.files.items():
            with open_file(directory, name, path) as file:
                _check_size(file, info)
    return manifest


def _check_names(directory: int, path: Path) -> Manifest:
    manifest = read_manifest_in(directory, path)
    present, listed = set(names_in(directory)) - {MANIFEST}, set(manifest.files)
    wrong = sorted(present ^ listed)
    if wrong:
        why = "is missing" if wrong[0] in listed else "does not belong to it"
        raise CheckpointCorrupt(
            f"The checkpoint `{path}` is broken: `{wrong[0]}` {why}.", path=path, file=wrong[0]
        )
    return manifest


def _check_size(file: HashedFile, info: FileInfo) -> None:
    if file.size != info.bytes:
        raise file.broken(f"it has {file.size} bytes, but {info.bytes} were written")


def _check_digest(file: HashedFile, info: FileInfo) -> None:
    if file.digest() != info.xxh3_128:
        raise file.broken(f"its content has changed (digest {file.digest()}, not {info.xxh3_128})")


def _read_tensors(file: HashedFile, info: FileInfo) -> dict[str, Any]:
    _check_size(file, info)
    header = tensor_file.read_header(file)
    found = tensors.read_tensors(file, header.in_file_order())
    _check_digest(file, info)
    is_ordered = header.metadata.get("container") == OrderedDict.__name__
    container = OrderedDict if is_ordered else dict
    return container((name, found[name]) for name in header.tensors)


def _read_tree(file: HashedFile, info: FileInfo, found: dict[str, Any]) -> Any:
    _check_size(file, info)
    content = file.read(file.size)
    _check_digest(file, info)
    try:
        return decoding.decode(strict_json.parse(content), found)
    except decoding.MALFORMED as error:
        raise file.broken(f"trainkit did not write it so: {error}") from error
