"""Where a model's tensors can be read from: files of weights, folders of them, checkpoints."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit.basics.formatting import first_few
from trainkit.checkpoint.format import strict_json
from trainkit.checkpoint.format.names import MANIFEST
from trainkit.errors import CheckpointCorrupt, CheckpointError
from trainkit.export.pickled import read_pickled
from trainkit.export.state import warn_of_others

if TYPE_CHECKING:
    from trainkit.checkpoint import Checkpoint

# In the order in which a folder is searched.
_ENTRIES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INDEX = ".index.json"
_PICKLES = (".bin", ".pt", ".pth")

Part = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that can be read.

    Args:
        read: Returns it on the CPU, in memory of its own; of a part, given as an index of slices,
            no more is read where the file allows it.
    """

    shape: tuple[int, ...]
    read: Callable[..., Tensor]


def find_weights(path: Path) -> Path:
    """Return the file in a folder that readers open first; a file, or a checkpoint, itself."""
    if path.is_file() or (path / MANIFEST).is_file():
        return path
    for entry in _ENTRIES:
        if (path / entry).is_file():
            return path / entry
    if len(indices := [*path.glob(f"*{_INDEX}")]) == 1:
        return indices[0]
    if not path.exists():
        hint = " Copy it here from its address first." * (":/" in str(path))
        raise CheckpointError(f"There is no checkpoint `{path}`.{hint}", path=path)
    listed = ", ".join(f"`{entry}`" for entry in _ENTRIES)
    raise CheckpointError(
        f"`{path}` holds no weights: none of {listed}, and no checkpoint of trainkit's "
        f"(`{MANIFEST}`). It holds {sorted(os.listdir(path))[:10]}.",
        path=path,
    )


@contextmanager
def open_weights(path: Path, of: Sequence[str] | None = None) -> Iterator[dict[str, Stored]]:
    """Open weights; return what can be read of them, by name, until the end.

    Args:
        path: A safetensors file, one of `torch.save`, an index, a folder with one of them, or a
            checkpoint of trainkit's.
        of: Whose weights are in the place of the model's: a callback, and the key of its state.

    Raises:
        CheckpointError: Something is missing, broken, or refused.
    """
    entry = find_weights(path)
    with ExitStack() as stack:
        if entry.is_dir():
            yield _open_checkpoint(entry, of)
        elif entry.name.endswith(_INDEX):
            yield _open_index(entry, stack)
        else:
            yield _open_file(entry, stack)


def _open_checkpoint(path: Path, of: Sequence[str] | None) -> dict[str, Stored]:
    from trainkit.checkpoint import CheckpointStore  # here: most files need no checkpoint

    checkpoint = CheckpointStore(path.parent).open(path)
    others: list[str] = []
    layout = checkpoint.layout("model", others)
    warn_of_others(others, "not loaded")
    weights = {
        name: Stored(stored.shape, partial(_of_checkpoint, checkpoint, name))
        for name, stored in layout.items()
    }
    if of is None:
        return weights
    name, key = of
    states = checkpoint.read("trainer")["callbacks"]
    if key not in states.get(name, {}):
        raise CheckpointError(
            f"The checkpoint `{path}` has no {key} of a callback `{name}`, only states of "
            f"{sorted(states)}. Use the checkpoint of a run that had it, and its name.",
            path=path,
        )
    held = states[name][key].items()
    return weights | {n: Stored(tuple(t.shape), partial(_of_memory, t)) for n, t in held}


def _of_checkpoint(checkpoint: "Checkpoint", name: str, part: Part = ()) -> Tensor:
    whole: Tensor = checkpoint.read_tensor("model", name)
    return whole[part]


def _open_index(path: Path, stack: ExitStack) -> dict[str, Stored]:
    weight_map = _read_index(path)
    missing = sorted({f for f in weight_map.values() if not (path.parent / f).is_file()})
    if missing:
        raise CheckpointCorrupt(
            f"The index `{path}` names files that are missing: {first_few(missing, 10)}. Copy "
            "them to the same folder, or export the model again.",
            path=path.parent,
            file=missing[0],
        )
    opened = {
        file: _open_file(path.parent / file, stack) for file in sorted(set(weight_map.values()))
    }
    lost = [name for name, file in weight_map.items() if name not in opened[file]]
    if lost:
        raise CheckpointCorrupt(
            f"The index `{path}` names tensors that their files do not hold: "
            f"{first_few(lost, 10)}.",
            path=path.parent,
            file=weight_map[lost[0]],
        )
    return {name: opened[file][name] for name, file in weight_map.items()}


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = strict_json.parse(path.read_bytes())  # older ones are nothing but the map
        weight_map = index["weight_map"] if "weight_map" in index or not index else index
        for name, file in weight_map.items():
            if type(file) is not str or Path(file).name != file:
                raise ValueError(f"`{name}` is said to be in {file!r}, no file of this folder")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"The index `{path}` is broken: {error}.", path=path.parent, file=path.name
        ) from error
    return dict(weight_map)


def _open_file(path: Path, stack: ExitStack) -> dict[str, Stored]:
    if path.suffix in _PICKLES:
        return _open_pickled(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"`{path}` is no file of weights: those end in `.safetensors`, `{_INDEX}`, or "
            f"{', '.join(f'`{suffix}`' for suffix in _PICKLES)}.",
            path=path.parent,
            file=path.name,
        )
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
        return {name: _mapped(file, name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointCorrupt(
            f"`{path}` cannot be read as safetensors: {error}.", path=path.parent, file=path.name
        ) from error


def _mapped(file: Any, name: str) -> Stored:
    shape = tuple(file.get_slice(name).get_shape())

    def read(part: Part = ()) -> Tensor:
        tensor: Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        return tensor.clone()  # the file is only mapped, and may be replaced or cut later

    return Stored(shape, read)


def _open_pickled(path: Path) -> dict[str, Stored]:
    advice = "Convert it to safetensors where you trust it."
    state = read_pickled(path, advice=advice)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"`{path}` holds a `{type(state).__name__}`, but a state dict is expected.",
            path=path.parent,
            file=path.name,
        )
    return {
        str(name): Stored(tuple(value.shape), partial(_of_memory, value))
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _of_memory(value: Tensor, part: Part = ()) -> Tensor:
    return (value[part] if part else value).clone()  # a sparse one has no parts
