"""The places of a module that tensors are loaded into."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.basics.torch_internals import buffers_of, is_saved, moves_in_place, parameters_of
from trainkit.checkpoint.exact import as_parameter
from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.export.state import plain_name, same_memory

__all__ = ["TensorTarget", "put_tensor", "targets_of"]


@dataclass(slots=True)
class TensorTarget:
    """A parameter or buffer, with all names and places that share it.

    Args:
        tensor: What is there now, perhaps on the device `meta`.
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def fill(self, value: Tensor, device: torch.device) -> None:
        """Put `value` there, with the dtype that it has and the strides of what is there.

        Of a sharded tensor it is what this process holds, which keeps its dtype.
        A tensor that is on `device` with this dtype is overwritten, so that an optimizer on it
        stays valid; one on `meta` is replaced.
        """
        present = self.tensor
        if is_sharded(present):
            with torch.no_grad():
                present.to_local().copy_(value)  # type: ignore[attr-defined]
        elif present.device == device and present.dtype == value.dtype:
            with torch.no_grad():  # what `detach` returns of a sparse one is a copy
                present.copy_(value)
        elif present.is_meta:
            self.replace(as_parameter(value.to(device), present))
        elif not moves_in_place(device):
            moved = as_parameter(value.to(device), present)
            torch.utils.swap_tensors(present, moved)  # type: ignore[no-untyped-call]
        else:
            moved = as_parameter(value.to(device), present)
            for module, name in self.places:
                getattr(module, name).data = moved

    def replace(self, value: Tensor) -> None:
        """Put `value` itself into all places."""
        if isinstance(self.tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        for module, name in self.places:
            put_tensor(module, name, value)
        self.tensor = value


def put_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Make `value` itself a parameter or buffer of a module."""
    parameters: dict[str, Any] = parameters_of(module)
    tensors = parameters if name in parameters else buffers_of(module)
    tensors[name] = value


def targets_of(model: nn.Module) -> dict[str, TensorTarget]:
    """Return the targets by name; names of tied tensors lead to one target.

    Buffers that are not saved with a model are left out.
    """
    found: dict[str, TensorTarget] = {}
    known: dict[Hashable, TensorTarget] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(parameters_of(module).items(), buffers_of(module).items()):
            if tensor is None or not is_saved(module, name):
                continue
            target = known.setdefault(same_memory(tensor), TensorTarget(tensor))
            full = plain_name(f"{prefix}.{name}" if prefix else name)
            target.names.append(full)
            target.places.append((module, name))
            found[full] = target
    return found
