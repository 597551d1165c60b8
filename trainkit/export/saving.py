"""Write the weights of a model for other programs, from any strategy."""

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.basics.outputs import absolute
from trainkit.checkpoint.io import files
from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.distributed import (
    Processes,
    only_this_process,
    run_on_all,
    run_on_all_or_main,
    run_on_main,
)
from trainkit.errors import ConfigError
from trainkit.export import adapters, pickled
from trainkit.export.layout import (
    ADAPTER,
    MODEL,
    Layout,
    lay_out,
    parse_size,
    weight_piece,
    write_weights,
)
from trainkit.export.publication import Publication
from trainkit.export.state import tensors_of, unwrapped, whole
from trainkit.types import Size, class_name


def save_model(
    model: nn.Module,
    directory: str | Path,
    max_shard_size: Size = "5GB",
    safe_serialization: bool = True,
    *,
    tokenizer: Any = None,
    merge: bool = False,
    processes: Processes | None = None,
) -> None:
    """Write a model so that `from_pretrained` and `load_checkpoint_in_model` can read it.

    Process 0 writes. It may be alone in calling it, but not for a sharded model, whose tensors are
    gathered one at a time. The files are `model.safetensors`, or
    `model-00001-of-0000N.safetensors` and so on with `model.safetensors.index.json`; for models
    of transformers also their configuration. Of a `PeftModel` they are those of its adapter,
    `adapter_model.safetensors` and `adapter_config.json`, for `PeftModel.from_pretrained`; of
    several adapters each but the one called "default" has a folder of its own. They appear when
    all are complete. An earlier export in the same folder is replaced.

    Args:
        model: Any module, as it is or as a strategy has wrapped it.
        directory: The folder; made where it is missing, and other files in it are kept.
        max_shard_size: Largest size of a file, such as "5GB", or bytes; only a single tensor
            that is larger makes a larger file. An adapter is one file.
        safe_serialization: False writes `pytorch_model.bin`, a pickle, for old readers.
        tokenizer: A tokenizer or processor with `save_pretrained`; its files go beside.
        merge: Of a `PeftModel`, write the whole model with the active adapter merged into it,
            under the names of its base. The model stays as it is, to the last bit.
        processes: The processes of the job; those of this program by default.

    Raises:
        ConfigError: The model or the folder cannot be exported; on all processes.
        CheckpointError: Writing failed; on all processes.
        DistributedError: Processes that must call it do not.
    """
    limit = parse_size(max_shard_size, "max_shard_size")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ConfigError(
            "`tokenizer` must be a tokenizer or processor with `save_pretrained`, but is a "
            f"`{type(tokenizer).__name__}`."
        )
    processes = Processes.start() if processes is None else processes
    module, folder = unwrapped(model), absolute(directory, "directory", stored=True)

    def export(processes: Processes) -> None:
        contents = run_on_all(processes, lambda: _contents(module, folder, merge))
        for directory, content in contents.items():
            if directory == folder and tokenizer is not None:
                content.beside.append(tokenizer.save_pretrained)
            publication = Publication(directory)
            try:
                _export(content, publication, limit, safe_serialization, processes)
            finally:
                if processes.is_main:
                    publication.discard()

    sharded = any(map(is_sharded, module.state_dict(keep_vars=True).values()))
    run_on_all_or_main(
        processes,
        "save_model",
        lambda: export(processes),
        None if sharded else lambda: export(only_this_process(processes)),
        key=str(directory),
    )


@dataclass(slots=True)
class _Content:
    """What goes into one folder."""

    tensors: dict[str, Tensor]  # by name, with the shapes and dtypes that are written
    beside: list[Callable[[Path], object]]  # write the other files into a folder
    read: Callable[[str], Tensor] | None = None  # of a tensor that is written otherwise than it is
    stems: tuple[str, str] = MODEL


def _contents(model: Any, directory: Path, merge: bool) -> dict[Path, _Content]:
    """Return what is written of a model, by folders."""
    adapted = adapters.is_adapted(model)
    if merge and not adapted:
        raise ConfigError(
            "`merge=True` merges the adapter of a `PeftModel` into its base, but the model is a "
            f"`{class_name(model)}`. Leave `merge` out."
        )
    if not adapted or merge:
        tensors, read = adapters.merged(model) if merge else (tensors_of(model), None)
        base = model.get_base_model() if merge else model
        return {directory: _Content(tensors, [partial(_write_configuration, base)], read)}
    return {
        folder: _Content(
            adapters.adapter_tensors(model, name),
            [partial(adapters.write_adapter_config, model, name)],
            stems=ADAPTER,
        )
        for name, folder in adapters.adapter_folders(model, directory).items()
    }


def _export(
    content: _Content, publication: Publication, limit: int, safe: bool, processes: Processes
) -> None:
    """Write and publish the files of one folder."""
    layout = Layout({}, 0, None)
    read = content.read or (lambda name: whole(content.tensors[name]))

    @publication.telling()
    def begin() -> None:
        nonlocal layout
        pieces = {name: weight_piece(name, tensor) for name, tensor in content.tensors.items()}
        most = sys.maxsize if content.stems == ADAPTER else limit
        layout = lay_out(pieces, most, safe=safe, stems=content.stems)
        publication.begin()

    @publication.telling()
    def write() -> None:
        failure: Exception | None = None
        for file, names in named.items():
            gathered = map(read, names)
            try:
                if processes.is_main and failure is None:
                    write_file(publication.folder / file, names, gathered)
            except Exception as error:
                failure = error
            for _ in gathered:
                pass  # the other processes wait for this one, even where it cannot write
        if failure is not None:
            raise failure

    def write_file(path: Path, names: list[str], gathered: Iterator[Tensor]) -> None:
        if safe:
            own = {name: content.tensors[name] for name in names}
            pieces = {n: weight_piece(n, like, lambda: next(gathered)) for n, like in own.items()}
            write_weights(path, pieces)
        else:
            tensors = {name: tensor.cpu() for name, tensor in zip(names, gathered, strict=True)}
            pickled.write_pickled(path, tensors)

    @publication.telling()
    def finish() -> None:
        if layout.index is not None:
            files.write_file(publication.folder / layout.index, [layout.encode_index()])
        for write_beside in content.beside:
            write_beside(publication.folder)
        publication.commit(layout.entry)

    run_on_main(processes, begin)
    # All gather in the order of process 0.
    named: dict[str, list[str]] = processes.broadcast_object(layout.files)
    run_on_all(processes, write)
    run_on_main(processes, finish)


def _write_configuration(model: nn.Module, folder: Path) -> None:
    """Write `config.json`, and how to generate, of a model of transformers; nothing of others."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    owner: Any = model
    config = copy.deepcopy(owner.config)
    config.architectures = [class_name(model)]
    config.dtype = str(owner.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if owner.can_generate() and owner.generation_config is not None:
        owner.generation_config.save_pretrained(folder)
