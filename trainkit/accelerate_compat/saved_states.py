"""Read what `save_state` of Accelerate wrote, without running what it holds."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.basics.packages import require
from trainkit.checkpoint import CheckpointStore
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export.pickled import Allowed, read_pickled
from trainkit.export.sources import open_weights

_RUN = "imported"
_MODEL = re.compile(r"(?:pytorch_)?model(_\d+)?\.(?:safetensors|bin)(\.index\.json)?")
_SHARD = re.compile(r"(?:pytorch_)?model-\d+-of-\d+\.(?:safetensors|bin)")
_PICKLED = re.compile(
    r"((?:optimizer|scheduler|sampler|dl_state_dict)(?:_\d+)?)\.bin|(scaler)\.pt"
    r"|((?:random_states|custom_checkpoint)_\d+)\.pkl"
)


def import_accelerate(
    source: Path, directory: Path, *, skip: Collection[str] = (), step: int | None = None
) -> Path:
    """Write a checkpoint of Accelerate's `save_state` as one of trainkit's; return its folder.

    Each file becomes a part of the same name: `model`, `optimizer`, `scheduler`, `scaler`,
    `random_states_0`, `custom_checkpoint_0` and so on, with what the objects' `load_state_dict`
    takes. Files that are pickles are read by torch's restricted reader, and only so.

    Args:
        skip: Names of files that are left out.
        step: Of the new checkpoint; None: the updates that the optimizer has counted, else 0.
    """
    if not source.is_dir():
        raise CheckpointError(f"There is no folder `{source}`.", path=source)
    present = sorted(path.name for path in source.iterdir())
    absent = sorted(set(skip) - set(present))
    if absent:
        raise ConfigError(f"`--skip` names {absent}, but `{source}` holds {present}.")
    parts: dict[str, Any] = {}
    for name in present:
        if name not in skip and _SHARD.fullmatch(name) is None:
            part, state = _read(source, name)
            parts[part] = state
    if not any(part.startswith("model") for part in parts):
        raise CheckpointError(
            f"`{source}` holds no weights (`model.safetensors`, `pytorch_model.bin` or an index), "
            f"only {present}.",
            path=source,
        )
    metadata = {"run_id": _RUN, "imported_from": "accelerate", "skipped": sorted(skip)}
    step = _updates(parts.get("optimizer")) if step is None else step
    store = CheckpointStore(directory)
    return store.save(step, parts, metadata=metadata)


def _read(source: Path, name: str) -> tuple[str, Any]:
    """Return the part that a file becomes, and its state."""
    if (match := _MODEL.fullmatch(name)) is not None:
        with open_weights(source / name) as stored:
            return f"model{match[1] or ''}", {key: one.read() for key, one in stored.items()}
    advice = f"Leave it out by `--skip {name}`."
    if (match := _PICKLED.fullmatch(name)) is None:
        raise CheckpointError(
            f"`{name}` in `{source}` is none of the files that `save_state` of Accelerate writes "
            f"on one device or with DDP. {advice}",
            path=source,
            file=name,
        )
    part = next(group for group in match.groups() if group)
    state = read_pickled(source / name, _numpy_globals(), advice)
    return part, state


def _numpy_globals() -> Allowed:
    """Return what arrays and numbers of NumPy are pickled with: they build, and run nothing."""
    require("numpy", "Reading a state of Accelerate")
    import numpy

    core: Any = numpy.empty(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]
    renamed: list[Any] = [
        (function, f"numpy.{module}.multiarray.{function.__name__}")
        for function in core
        for module in ("core", "_core")
    ]
    dtypes = [type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdFD"]
    return [*renamed, numpy.ndarray, numpy.dtype, *dict.fromkeys(dtypes)]


def _updates(optimizer: Any) -> int:
    """Return the largest number of updates in the state of an optimizer; 0 where there is none."""
    states = optimizer.get("state", {}).values() if isinstance(optimizer, dict) else ()
    steps = [state["step"] for state in states if isinstance(state, dict) and "step" in state]
    return max((int(s) for s in steps if isinstance(s, int | float | Tensor)), default=0)
