"""Write the weights in a checkpoint for other programs, without the model and without a GPU."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.checkpoint import Checkpoint, CheckpointStore
from trainkit.checkpoint.format.tensor_file import Piece
from trainkit.checkpoint.format.tensor_location import StoredTensor
from trainkit.checkpoint.format.tensors import tensor_piece
from trainkit.checkpoint.io import files
from trainkit.errors import CheckpointError
from trainkit.export.layout import Layout, lay_out, parse_size, write_weights
from trainkit.export.publication import Publication
from trainkit.export.state import warn_of_others
from trainkit.types import Size


def export_checkpoint(
    checkpoint: Path, directory: Path, *, part: str | None = None, max_shard_size: Size = "5GB"
) -> Layout:
    """Write one part of a checkpoint as `save_model` writes a model; return which files there are.

    Sharded tensors are put together, one at a time; tied ones are written once. What is no tensor
    is left out with a warning.

    Args:
        checkpoint: The folder of one checkpoint; every byte of it is verified first.
        part: A dict of tensors by name, such as "model". None: the model with the weights that its
            metrics are of, such as the average of `EMA`.

    Raises:
        CheckpointError: The checkpoint is broken, or has no such part; or writing failed.
        ConfigError: `directory` or `max_shard_size` cannot work.
    """
    limit = parse_size(max_shard_size, "max_shard_size")
    opened = CheckpointStore(checkpoint.parent).open(checkpoint)
    metadata = opened.manifest.metadata
    told: Any = metadata.get("evaluated_weights") if part is None else None
    part = part or "model"
    if part == "model" and "reference" in metadata:
        raise CheckpointError(
            f"The checkpoint `{checkpoint}` holds what was trained, and refers to its base for the "
            "rest, so it cannot be exported by itself. Resume from it by `fit`, or load it into "
            "the base by `load_checkpoint_in_model`, and call `save_model`.",
            path=checkpoint,
        )
    held = {} if told is None else opened.read("trainer")["callbacks"][told[0]][told[1]]
    pieces = _pieces(opened, part, held)
    layout = lay_out(pieces, limit, safe=True)
    publication = Publication(directory)
    try:
        with publication.telling():
            publication.begin()
            for file, names in layout.files.items():
                own = {name: pieces[name] for name in names}
                write_weights(publication.folder / file, own)
            if layout.index is not None:
                files.write_file(publication.folder / layout.index, [layout.encode_index()])
            publication.commit(layout.entry)
    finally:
        publication.discard()
    return layout


def _pieces(
    checkpoint: Checkpoint, part: str, substitutes: Mapping[str, Tensor]
) -> dict[str, Piece]:
    """Return what is written of each tensor of a part; `substitutes` are written in their place."""
    names: dict[StoredTensor, str] = {}
    left_out: list[str] = []
    layout = checkpoint.layout(part, left_out)
    for name, stored in layout.items():
        names.setdefault(stored, name)
    warn_of_others(left_out)
    instead = {names[layout[name]]: other for name, other in substitutes.items() if name in layout}
    return {
        name: Piece(
            stored.dtype,
            stored.shape,
            partial(_bytes_of, checkpoint, part, name, instead.get(name)),
        )
        for stored, name in names.items()
    }


def _bytes_of(checkpoint: Checkpoint, part: str, name: str, instead: Tensor | None) -> memoryview:
    tensor: Tensor = checkpoint.read_tensor(part, name)
    tensor = tensor if instead is None else instead.to(tensor.dtype)
    return tensor_piece(tensor, name)[0].data()
