"""Torch's own files (`.bin`, `.pt`), which are pickles: written on request, read without running.

The one place that calls `torch.load` and `torch.save`. Reading never falls back to pickle: torch's
restricted reader builds tensors and plain containers and refuses every other global.
"""

import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainkit.errors import CheckpointError, ConfigError
from trainkit.export.state import same_memory

Allowed = Sequence[Callable[..., Any] | tuple[Callable[..., Any], str]]
"""Globals that a file may name besides those that torch allows, as `safe_globals` takes them."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def read_pickled(path: Path, allowed: Allowed = (), advice: str = "") -> Any:
    """Return what a file holds, on the CPU.

    Args:
        allowed: Globals that may be called besides those that torch allows.
    """
    try:
        with (
            torch.serialization.safe_globals(list(allowed)),
            torch.sparse.check_sparse_tensor_invariants(),  # type: ignore[no-untyped-call]
            warnings.catch_warnings(),
        ):
            # Wrong indices would read anywhere. Torch 2.15 always checks, and warns of the time.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no file `{path}`.", path=path) from error
    except Exception as error:  # whatever a broken or hostile file makes the reader raise
        match = _GLOBAL.search(str(error))
        why = "it is no file that `torch.save` wrote, or it is broken"
        if match is not None:
            why = f"it asks for `{match[1]}` to be called, which could run any code"
        text = f"`{path}` is refused: {why}. {advice}".rstrip()
        raise CheckpointError(text, path=path.parent, file=path.name) from None


def write_pickled(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as `torch.save` does."""
    torch.save(tensors, path)


def save(obj: Any, f: Any, *, safe_serialization: bool) -> None:
    """Write `obj` to the file `f`.

    Args:
        obj: Anything; a dict of tensors where `safe_serialization`, of which tied ones are written
            once, under the first of their names.
        safe_serialization: Write safetensors; else what `torch.load` reads, a pickle, which
            trainkit itself never loads.
    """
    if not safe_serialization:
        write_pickled(f, obj)
        return
    if not isinstance(obj, dict) or not all(isinstance(v, torch.Tensor) for v in obj.values()):
        raise ConfigError(
            f"`safe_serialization` needs a dict of tensors, but `obj` is a {type(obj).__name__} "
            "that is none."
        )
    first = {same_memory(tensor): name for name, tensor in reversed(obj.items())}
    own = {name: t.contiguous() for name, t in obj.items() if first[same_memory(t)] == name}
    if tied := sorted(obj.keys() - own.keys()):
        warnings.warn(f"{tied} share their memory with others, and are left out.", stacklevel=3)
    save_file(own, Path(f))
