"""Modules whose tensors are elsewhere until their forward needs them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainkit.checkpoint.io import files
from trainkit.containers.tree import map_leaves
from trainkit.errors import ConfigError
from trainkit.export.layout import weight_piece, write_weights
from trainkit.export.loading import TensorTarget, put_tensor
from trainkit.export.state import READ

_FILE = "offloaded.safetensors"
# Their forward uses the parameters of their children itself.
_TAKEN_WHOLE = (nn.MultiheadAttention,)

Read = Callable[[], Tensor]


def write_offloaded(folder: Path, values: Mapping[str, tuple[Tensor, Read]]) -> Path:
    """Write tensors into one file, one at a time in memory, and return it.

    Args:
        folder: Made where it is missing; an earlier file of this kind is replaced.
        values: By name: a tensor of the shape and dtype, and what returns the values.
    """
    pieces = {name: weight_piece(name, like, read) for name, (like, read) in values.items()}
    path = folder / _FILE
    try:
        files.make_directories(folder)
        path.unlink(missing_ok=True)  # a model that has mapped the earlier one keeps it
        write_weights(path, pieces)
    except OSError as error:
        raise ConfigError(
            f"`offload_folder` (`{folder}`) cannot be written to: {error}. Pass another folder."
        ) from error
    return path


def read_back(path: Path) -> Callable[[str], Tensor]:
    """Return what reads a tensor of a file by its name; the file is mapped into memory."""
    file: Any = safe_open(path, framework="pt")
    return lambda name: file.get_tensor(name).clone()


def offload(
    model: nn.Module,
    targets: Mapping[str, tuple[TensorTarget, Read, torch.device]],
    whole_classes: frozenset[str] = frozenset(),
) -> None:
    """Let modules fetch tensors before their forward and give them up after it.

    Args:
        model: The model; from now on it is for inference.
        targets: By name: where the tensor belongs, what reads it, and the device to run on.
        whole_classes: Names of classes whose modules fetch all that is below them at once.
    """
    units: dict[nn.Module, _Unit] = {}
    owners = _owners(model, whole_classes)
    for target, read, device in targets.values():
        empty = torch.empty_like(target.tensor, device="meta")
        target.replace(empty)
        for module, name in target.places:
            owner = owners[module]
            unit = units.setdefault(owner, _Unit(device))
            unit.tensors.append((module, name, read, target.tensor))
        setattr(target.tensor, READ, read)
    for owner, unit in units.items():
        owner.register_forward_pre_hook(unit.fetch)
        owner.register_forward_hook(unit.give_up, always_call=True)


def _owners(model: nn.Module, whole_classes: frozenset[str]) -> dict[nn.Module, nn.Module]:
    """Return for each module the one whose forward its tensors must be there for."""
    owners: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, _TAKEN_WHOLE) or type(module).__name__ in whole_classes:
            for inner in module.modules():
                owners.setdefault(inner, owners.get(module, module))
        owners.setdefault(module, module)
    return owners


class _Unit:
    """What one module fetches: place, name, reader and what stands there without values."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: list[tuple[nn.Module, str, Read, Tensor]] = []
        self._device = device

    def fetch(self, module: nn.Module, inputs: Any) -> None:
        """Fetch all tensors but those that were loaded anew."""
        self.tensors = [one for one in self.tensors if getattr(one[0], one[1]).is_meta]
        for owner, name, read, empty in self.tensors:
            value = read().to(self._device)
            if isinstance(empty, nn.Parameter):
                value = nn.Parameter(value, requires_grad=False)
            put_tensor(owner, name, value)

    def give_up(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Give the memory of all back."""
        for owner, name, _, empty in self.tensors:
            put_tensor(owner, name, empty)


def align_devices(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Let modules move their inputs to their device, and the model its outputs back.

    Args:
        devices: By name of the module; names of single tensors are passed over.
    """
    modules, origin = dict(model.named_modules()), list[torch.device]()

    def move(device: torch.device, module: nn.Module, inputs: Any, options: Any) -> Any:
        return moved(inputs, device), moved(options, device)

    def note(leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            origin.append(leaf.device)

    def note_all(module: nn.Module, inputs: Any, options: Any) -> None:
        origin.clear()
        map_leaves((inputs, options), note)

    def bring_back(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return moved(outputs, origin[0]) if origin else outputs

    for name, device in devices.items():
        if name in modules:
            modules[name].register_forward_pre_hook(partial(move, device), with_kwargs=True)
    model.register_forward_pre_hook(note_all, with_kwargs=True, prepend=True)
    model.register_forward_hook(bring_back)


def moved(tree: Any, device: torch.device) -> Any:
    """Return a nesting with its tensors on a device."""
    return map_leaves(tree, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
