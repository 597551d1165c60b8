"""Write the weights in a checkpoint for other programs, without the model and without a GPU."""

from functools import partial
from pathlib import Path

from torch import Tensor

from trainkit.checkpoint import Checkpoint, CheckpointStore
from trainkit.checkpoint.format.tensor_file import Piece
from trainkit.checkpoint.format.tensor_location import StoredTensor
from trainkit.checkpoint.format.tensors import tensor_piece
from trainkit.checkpoint.io import files
from trainkit.errors import CheckpointError
from trainkit.export.layout import Layout, lay_out, write_weights
from trainkit.export.publication import Publication
from trainkit.export.sizes import parse_size
from trainkit.export.state import warn_of_others
from trainkit.types import Size

__all__ = ["export_checkpoint"]


def export_checkpoint(
    checkpoint: Path, directory: Path, *, part: str = "model", max_shard_size: Size = "5GB"
) -> Layout:
    """Write one part of a checkpoint as `save_model` writes a model; return which files there are.

    Sharded tensors are put together, one at a time; tied ones are written once. What is no tensor
    is left out with a warning.

    Args:
        checkpoint: The folder of one checkpoint; every byte of it is verified first.
        directory: Where the files go; an earlier export there is replaced.
        part: A dict of tensors by name, such as "model".
        max_shard_size: Largest size of a file.

    Raises:
        CheckpointError: The checkpoint is broken, or has no such part; or writing failed.
        ConfigError: `directory` or `max_shard_size` cannot work.
    """
    limit = parse_size(max_shard_size, "max_shard_size")
    opened = CheckpointStore(checkpoint.parent).open(checkpoint)
    if part == "model" and "reference" in opened.manifest.metadata:
        raise CheckpointError(
            f"The checkpoint `{checkpoint}` holds what was trained, and refers to its base for the "
            "rest, so it cannot be exported by itself. Resume from it by `fit`, or load it into "
            "the base by `load_checkpoint_in_model`, and call `save_model`.",
            path=checkpoint,
        )
    names: dict[StoredTensor, str] = {}
    others: list[str] = []
    for name, stored in opened.layout(part, others).items():
        names.setdefault(stored, name)
    warn_of_others(others)
    pieces = {
        name: Piece(stored.dtype, stored.shape, partial(_bytes_of, opened, part, name))
        for stored, name in names.items()
    }
    layout = lay_out(pieces, limit, safe=True)
    publication = Publication(directory)
    try:
        publication.begin()
        for file, held in layout.files.items():
            own = {name: pieces[name] for name in held}
            write_weights(publication.folder / file, own)
        if layout.index is not None:
            files.write_file(publication.folder / layout.index, [layout.encode_index()])
        publication.commit(layout.entry)
    except OSError as error:
        raise publication.failed(error) from error
    finally:
        publication.discard()
    return layout


def _bytes_of(checkpoint: Checkpoint, part: str, name: str) -> memoryview:
    tensor: Tensor = checkpoint.read_tensor(part, name)
    return tensor_piece(tensor, name)[0].data()
