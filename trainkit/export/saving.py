"""Write the weights of a model for other programs, from any strategy."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from trainkit.checkpoint.io import files
from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.distributed import (
    Processes,
    only_this_process,
    run_on_all,
    run_on_all_or_main,
    run_on_main,
)
from trainkit.export import pickled, pretrained
from trainkit.export.layout import Layout, lay_out, weight_piece, write_weights
from trainkit.export.publication import Publication
from trainkit.export.sizes import parse_size
from trainkit.export.state import tensors_of, unwrapped, whole
from trainkit.types import Size

__all__ = ["save_model"]


def save_model(
    model: nn.Module,
    directory: str | Path,
    max_shard_size: Size = "5GB",
    safe_serialization: bool = True,
    *,
    processes: Processes | None = None,
) -> None:
    """Write a model so that `from_pretrained` and `load_checkpoint_in_model` can read it.

    Process 0 writes. It may be alone in calling it, but not for a sharded model, whose tensors are
    gathered one at a time. The files are `model.safetensors`, or
    `model-00001-of-0000N.safetensors` and so on with `model.safetensors.index.json`; for models
    of transformers also their configuration. They appear when all are complete. An earlier export
    in the same folder is replaced.

    Args:
        model: Any module, as it is or as a strategy has wrapped it.
        directory: The folder; made where it is missing, and other files in it are kept.
        max_shard_size: Largest size of a file, such as "5GB", or bytes; only a single tensor
            that is larger makes a larger file.
        safe_serialization: False writes `pytorch_model.bin`, a pickle, for old readers.
        processes: The processes of the job; those of this program by default.

    Raises:
        ConfigError: The model or the folder cannot be exported; on all processes.
        CheckpointError: Writing failed; on all processes.
        DistributedError: Processes that must call it do not.
    """
    limit = parse_size(max_shard_size, "max_shard_size")
    processes = Processes.start() if processes is None else processes
    module, folder = unwrapped(model), Path(directory)

    def export(processes: Processes) -> None:
        export = _Export(module, folder, limit, safe_serialization, processes)
        try:
            export.run()
        finally:
            if processes.is_main:
                export.publication.discard()

    sharded = any(map(is_sharded, module.state_dict(keep_vars=True).values()))
    run_on_all_or_main(
        processes,
        "save_model",
        lambda: export(processes),
        None if sharded else lambda: export(only_this_process(processes)),
        key=str(directory),
    )


class _Export:
    def __init__(
        self, model: nn.Module, directory: Path, limit: int, safe: bool, processes: Processes
    ) -> None:
        self.publication = Publication(directory)
        self._model = model
        self._limit = limit
        self._safe = safe
        self._processes = processes
        self._tensors: dict[str, Tensor] = {}
        self._layout = Layout({}, 0, None)

    def run(self) -> None:
        """Write and publish all files."""
        run_on_all(self._processes, self._collect)
        run_on_main(self._processes, self._guarded(self._begin))
        # All gather in the order of process 0.
        layout: dict[str, list[str]] = self._processes.broadcast_object(self._layout.files)
        run_on_all(self._processes, self._guarded(lambda: self._write(layout)))
        run_on_main(self._processes, self._guarded(self._finish))

    def _collect(self) -> None:
        self._tensors = tensors_of(self._model)

    def _begin(self) -> None:
        pieces = {name: weight_piece(name, tensor) for name, tensor in self._tensors.items()}
        self._layout = lay_out(pieces, self._limit, safe=self._safe)
        self.publication.begin()

    def _write(self, layout: Mapping[str, list[str]]) -> None:
        failure: Exception | None = None
        for file, names in layout.items():
            gathered = (whole(self._tensors[name]) for name in names)
            try:
                if self._processes.is_main and failure is None:
                    self._write_file(self.publication.folder / file, names, gathered)
            except Exception as error:
                failure = error
            for _ in gathered:
                pass  # the other processes wait for this one, even where it cannot write
        if failure is not None:
            raise failure

    def _write_file(self, path: Path, names: list[str], gathered: Iterator[Tensor]) -> None:
        if not self._safe:
            tensors = {name: tensor.cpu() for name, tensor in zip(names, gathered, strict=True)}
            pickled.write_pickled(path, tensors)
            return
        pieces = {
            name: weight_piece(name, self._tensors[name], lambda: next(gathered)) for name in names
        }
        write_weights(path, pieces)

    def _finish(self) -> None:
        if self._layout.index is not None:
            content = self._layout.encode_index()
            files.write_file(self.publication.folder / self._layout.index, [content])
        pretrained.write_configuration(self._model, self.publication.folder)
        self.publication.commit(self._layout.entry)

    def _guarded(self, action: Callable[[], None]) -> Callable[[], None]:
        return partial(_told_as_ours, action, self.publication)


def _told_as_ours(action: Callable[[], None], publication: Publication) -> None:
    try:
        action()
    except OSError as error:
        raise publication.failed(error) from error
