"""One save: all processes plan and write their files with digests, process 0 commits.

The order of the operations is what makes a power cut harmless at any moment (rule 24); tests
take each of them out and see the harm.
"""

import errno as errors
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from trainkit.basics.formatting import readable_size
from trainkit.checkpoint.format import codec, strict_json, tensor_file
from trainkit.checkpoint.format.manifest import FileInfo, Manifest, read_manifest
from trainkit.checkpoint.format.names import (
    JSON_SUFFIX,
    MANIFEST,
    PACK,
    TEMPORARY,
    TENSOR_SUFFIX,
    TRASH,
    folder_name,
    is_of_one_process,
    why_refused,
)
from trainkit.checkpoint.io import files
from trainkit.checkpoint.io.digests import xxh3_128, xxh3_128_hexdigest
from trainkit.checkpoint.listing import Entry, committed, folders
from trainkit.errors import CheckpointCorrupt, CheckpointError, TrainkitError, text_of

_SENT = 1 << 16  # bytes; process 0 holds those of all processes

_Written = tuple[str, int, str]
"""Name, bytes and digest of a file."""


@dataclass(frozen=True, slots=True)
class _PlannedFile:
    """A file that will be written."""

    name: str
    size: int  # bytes
    chunks: Callable[[], Iterable[bytes | memoryview]]  # returns its content, piece by piece
    version: int = 1  # the least of the format that has what is in it

    @property
    def is_sent(self) -> bool:
        """Whether process 0 writes it for the process that has it, if there are several."""
        return self.size <= _SENT and is_of_one_process(self.name)


def _plan(parts: Mapping[str, Any]) -> list[_PlannedFile]:
    """Return the files of some parts; tensors are copied when they are written, not before."""
    planned = []
    for name, state in parts.items():
        why = why_refused(name)
        if why is not None:
            raise CheckpointError(f"The part {name!r:.200} {why}. Give it another name.")
        planned += _plan_part(name, state)
    return planned


def _plan_part(name: str, state: Any) -> list[_PlannedFile]:
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
        planned.append(_PlannedFile(name + TENSOR_SUFFIX, size, chunks, encoded.version))
    if not encoded.is_plain:
        content = strict_json.dump(encoded.tree)
        if len(content) > strict_json.LARGEST:
            raise _too_large(name, len(content), encoded.tree)
        file = _PlannedFile(name + JSON_SUFFIX, len(content), lambda: [content], encoded.version)
        planned.append(file)
    return planned


def _too_large(name: str, size: int, tree: Any) -> CheckpointError:
    inside = {}
    if type(tree) is dict:
        inside = {key: len(strict_json.dump(value)) for key, value in tree.items()}
    largest = max(inside, key=inside.__getitem__, default="")
    mostly = f", most of it in `{name}.{largest}`" if largest else ""
    return CheckpointError(
        f"`{name}` makes {size} bytes of JSON{mostly}, but at most {strict_json.LARGEST} are "
        "allowed. Store large numbers of values as tensors or arrays."
    )


def _pack(contents: Mapping[str, bytes]) -> tuple[_PlannedFile, dict[str, FileInfo]]:
    """Return the file that holds small ones of many processes, and where each is in there."""
    infos: dict[str, FileInfo] = {}
    size = 0
    for name, content in sorted(contents.items()):
        digest = xxh3_128_hexdigest(content)
        infos[name] = FileInfo(bytes=len(content), xxh3_128=digest, pack=PACK, begin=size)
        size += len(content)
    return _PlannedFile(PACK, size, lambda: [contents[name] for name in infos], version=4), infos


def _check_unique(names: Iterable[Iterable[str]]) -> None:
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


T = TypeVar("T")

Agree: TypeAlias = Callable[[Any, Callable[[list[Any]], Any]], Any]
"""`agree(value, action)` runs `action` on process 0 with the values of all processes, in order of
their ranks, and returns its result on all."""

Failure = tuple[str, str | None, int | None]
"""What happened in words, the file at fault, and the number of the system's error."""


def alone(value: Any, action: Callable[[list[Any]], Any]) -> Any:
    """Agree on one process."""
    return action([value])


Announced = Sequence[Sequence[tuple[str, int, int, bytes | None]]]
"""The files of each process: names, bytes, versions of the format, and the contents of those that
process 0 writes where there are several processes: they need no file each."""


class Save:
    """A checkpoint on its way to the disk; see `CheckpointStore.save`."""

    def __init__(
        self, directory: Path, step: int, metadata: Mapping[str, Any], agree: Agree, courier: Any
    ) -> None:
        self.entry: Entry | None = None
        """What process 0 has committed."""
        self._directory = directory
        self._step = step
        self._metadata = metadata
        self._pack: list[_PlannedFile] = []  # on process 0, what it writes for all
        self._packed: dict[str, FileInfo] = {}
        self._run_id = str(metadata.get("run_id", ""))
        self._agree = agree
        self._courier = courier
        self._needed = 0  # bytes that all processes together want to write
        self._temporary = directory / f"{TEMPORARY}{step}-{uuid.uuid4().hex[:12]}"

    def run(self, parts: Mapping[str, Any]) -> Path:
        """Save `parts` and return the folder of the checkpoint.

        Raises:
            CheckpointError: It failed on some process; raised by all.
        """
        planned: list[_PlannedFile] = []

        def prepare() -> list[tuple[str, int, int, bytes | None]]:
            planned.extend(_plan(parts))
            return [
                (f.name, f.size, f.version, b"".join(f.chunks()) if f.is_sent else None)
                for f in planned
            ]

        try:
            folder, version, self._needed, takes = self._step_of_all(prepare, self._begin)
            own = [file for file in planned if not (takes and file.is_sent)]
            path, planned = self._directory / folder, [*own, *self._pack]
            digests: dict[str, Any] = {}
            contents = [(path / file.name, _hashed(file, digests)) for file in planned]
            deliver = None if self._courier is None else self._courier.deliver
            is_sent = deliver is not None and deliver(contents, path, self._step_of_all)

            def write() -> list[_Written]:
                """Write files and return what they must be, once they survive a power cut."""
                if not is_sent:
                    files.write_files(contents)
                return [(f.name, f.size, digests[f.name].hexdigest()) for f in planned]

            name = self._step_of_all(write, lambda written: self._commit(written, version))
        finally:
            # On process 0, where it exists until it is renamed; on others it never did.
            with suppress(OSError):  # what stays is invisible, and removed at the next start
                files.remove_tree(self._temporary)
        return self._directory / name

    def _step_of_all(self, action: Callable[[], Any], conclude: Callable[[list[Any]], T]) -> T:
        """Do `action` on every process, then `conclude` on process 0 with what each one returned.

        Returns:
            What `conclude` returned, on all.

        Raises:
            CheckpointError: One of them failed somewhere; raised by all, with the cause where
                that is.
        """
        causes: list[Exception] = []

        def attempt(work: Callable[[], Any]) -> tuple[Failure | None, Any]:
            try:
                return None, work()
            except Exception as error:  # all must hear of it, whatever it is
                causes.append(error)
                return self._describe(error), None

        def lead(answers: list[Any]) -> tuple[str, Failure | None, Any]:
            several = len(answers) > 1
            for rank, (failure, _) in enumerate(answers):
                if failure:
                    return f" on process {rank}" * several, failure, None
            failure, result = attempt(lambda: conclude([result for _, result in answers]))
            return " on process 0" * several, failure, result

        who, failure, result = self._agree(attempt(action), lead)
        if failure is not None:
            text, file, errno = failure
            raise CheckpointError(
                f"Saving step {self._step} failed{who}: {text}",
                path=self._directory,
                file=file,
                errno=errno,
            ) from next(iter(causes), None)
        return cast("T", result)

    def _describe(self, error: Exception) -> Failure:
        if not isinstance(error, OSError):
            file = error.file if isinstance(error, CheckpointError) else None
            kind = "" if isinstance(error, TrainkitError) else f"{type(error).__name__}: "
            return f"{kind}{text_of(error)}", file, None
        code, kept = errors.errorcode.get(error.errno or 0, "unknown error"), ""
        with suppress(OSError):  # of the same disk; the first error is what matters
            steps = [entry.step for entry in committed(self._directory)]
            kept = (
                f"The last committed step is {steps[-1]}. "
                if steps
                else "No step is committed yet. "
            )
        text = (
            f"{error.strerror} ({code}) at `{_text(error.filename)}`. The checkpoint needs "
            f"{readable_size(self._needed)}, and {readable_size(_free(self._directory))} are free "
            f"in `{self._directory}`. {kept}Earlier checkpoints are untouched. Make room or "
            "choose another `output_dir`, then resume."
        )
        return text, _text(error.filename), error.errno

    def _begin(self, announced: Announced) -> tuple[str, int, int, bool]:
        """Make the folder.

        Returns:
            Its name, the version of the format, the bytes to come, and whether process 0 writes
            what it was sent.
        """
        every = [file for of_one in announced for file in of_one]
        self._needed = sum(size for _, size, *_ in every)
        version = max((version for *_, version, _ in every), default=1)
        contents = {name: content for name, *_, content in every if content is not None}
        takes = len(announced) > 1 and bool(contents)
        if takes:
            file, self._packed = _pack(contents)
            self._pack, version = [file], max(version, file.version)
        _check_unique([[name for name, *_ in of_one] for of_one in announced])
        files.make_directories(self._directory)
        self._replaced()
        files.make_directory(self._temporary)
        return self._temporary.name, version, self._needed, takes

    def _commit(self, written: Sequence[Sequence[_Written]], version: int) -> str:
        """Publish what all have written; return the name of the folder."""
        infos = {
            name: FileInfo(bytes=size, xxh3_128=digest)
            for of_one in written
            for name, size, digest in of_one
            if name != PACK
        }
        replaced = self._replaced()
        manifest = Manifest(
            format_version=version,
            step=self._step,
            revision=max((old.manifest.revision + 1 for old in replaced), default=0),
            run_id=self._run_id,
            world_size=len(written),
            files=dict(sorted((infos | self._packed).items())),
            metadata=self._metadata,
        )
        revision = manifest.revision
        while (target := self._directory / folder_name(self._step, revision)).is_symlink() or (
            target.exists()  # also what is no checkpoint
        ):
            revision += 1
        files.write_file(self._temporary / MANIFEST, [manifest.encode()])
        files.sync_directory(self._temporary)
        files.rename(self._temporary, target)
        try:
            files.sync_directory(self._directory)
        except OSError:
            # Nobody knows whether the name lasts: what is not acknowledged must not be found.
            files.rename(target, self._temporary)
            raise
        self.entry = Entry(target, self._step, manifest)
        for old in replaced:
            with suppress(OSError):  # the new one is newer in any case, by its revision
                throw_away(old.path)
        return target.name

    def _replaced(self) -> list[Entry]:
        """Return earlier saves of this step by this run."""
        same = [entry for entry in committed(self._directory) if entry.step == self._step]
        for entry in same:
            if entry.manifest.run_id != self._run_id:
                raise CheckpointError(
                    f"`{entry.path}` was saved by the run {entry.manifest.run_id!r}, but this is "
                    f"{self._run_id!r}. Choose another `output_dir`, or resume from it.",
                    path=entry.path,
                )
        for path in folders(self._directory):
            if path.name == folder_name(self._step, 0):
                with suppress(CheckpointCorrupt):  # is left alone, and another name taken
                    read_manifest(path)
        return same


def _hashed(file: _PlannedFile, digests: dict[str, Any]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file, whose digest grows meanwhile."""
    digest, size = digests.setdefault(file.name, xxh3_128()), 0
    for chunk in file.chunks():
        digest.update(chunk)
        size += len(chunk)
        yield chunk
    if size != file.size:
        raise CheckpointError(
            f"`{file.name}` should have {file.size} bytes, but {size} were written: a tensor has "
            "been changed while it was being saved. Save at the end of a step."
        )


def _text(name: Any) -> str | None:
    return None if name is None else os.fsdecode(name)


def _free(directory: Path) -> int:
    """Return the bytes that are free for us where `directory` is or will be; 0 if unknown."""
    for folder in (directory, *directory.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return 0


def throw_away(path: Path) -> None:
    """Remove a checkpoint so that at no moment a part of it is visible.

    Raises:
        OSError: It could not be removed, or not completely; what is left is invisible.
    """
    trash = path.with_name(f"{TRASH}{path.name}-{uuid.uuid4().hex[:12]}")
    files.rename(path, trash)
    files.sync_directory(path.parent)
    files.remove_tree(trash)
