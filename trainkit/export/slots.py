"""The places of a module that tensors are loaded into."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from trainkit.checkpoint.exact import as_parameter
from trainkit.export.state import is_sharded, plain_name, same_memory

__all__ = ["Slot", "slots_of"]


@dataclass(slots=True)
class Slot:
    """A parameter or buffer, with all names and places that share it.

    Args:
        tensor: What is there now, perhaps on the device `meta`.
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def fill(self, value: Tensor, device: torch.device) -> None:
        """Put `value` there, with the dtype that it has and the strides of what is there.

        A tensor that is on `device` with this dtype is overwritten, so that an optimizer on it
        stays valid; one on `meta` is replaced.
        """
        present = self.tensor
        if is_sharded(present):
            _fill_sharded(present, value)
        elif present.device == device and present.dtype == value.dtype:
            with torch.no_grad():  # what `detach` returns of a sparse one is a copy
                present.copy_(value)
        elif present.is_meta:
            self.replace(as_parameter(value.to(device), present))
        else:
            moved = as_parameter(value.to(device), present)
            for module, name in self.places:
                getattr(module, name).data = moved

    def replace(self, value: Tensor) -> None:
        """Put `value` itself into all places."""
        if isinstance(self.tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=self.tensor.requires_grad)
        for module, name in self.places:
            tensors = module._parameters if name in module._parameters else module._buffers
            tensors[name] = value  # type: ignore[assignment]
        self.tensor = value


def _fill_sharded(present: Tensor, value: Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor  # heavy, and rarely needed

    assert isinstance(present, DTensor)
    mesh = present.device_mesh
    value = value.to(mesh.device_type, present.dtype)
    present.detach().copy_(distribute_tensor(value, mesh, present.placements))


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Return the slots by name; names of tied tensors lead to one slot.

    Buffers that are not saved with a model are left out.
    """
    found: dict[str, Slot] = {}
    known: dict[Hashable, Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            slot = known.setdefault(same_memory(tensor), Slot(tensor))
            full = plain_name(f"{prefix}.{name}" if prefix else name)
            slot.names.append(full)
            slot.places.append((module, name))
            found[full] = slot
    return found
