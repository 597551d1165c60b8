"""`Accelerator.save`: write one object where the user says."""

from pathlib import Path
from typing import Any

import torch

from trainkit.errors import ConfigError
from trainkit.export.pickled import write_pickled

__all__ = ["save"]


def save(obj: Any, f: Any, *, safe_serialization: bool) -> None:
    """Write `obj` to the file `f`.

    Args:
        obj: Anything; a dict of tensors where `safe_serialization`.
        f: A path.
        safe_serialization: Write safetensors; else what `torch.load` reads, a pickle, which
            trainkit itself never loads.
    """
    if not safe_serialization:
        write_pickled(f, obj)
        return
    from safetensors.torch import save_file

    if not isinstance(obj, dict) or not all(isinstance(v, torch.Tensor) for v in obj.values()):
        raise ConfigError(
            f"`safe_serialization` needs a dict of tensors, but `obj` is a {type(obj).__name__} "
            "that is none."
        )
    save_file({name: tensor.contiguous() for name, tensor in obj.items()}, Path(f))
