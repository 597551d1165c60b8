"""Fill a model from files of weights, each tensor where it stands."""

import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.basics.torch_internals import buffers_of, is_saved, moves_in_place, parameters_of
from trainkit.checkpoint.exact import as_parameter
from trainkit.checkpoint.resharding.sharding_spec import held_part, is_sharded
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export.sources import Stored, open_weights
from trainkit.export.state import plain_name, same_memory, unwrapped


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
    targets: dict[str, TensorTarget] = {}
    known: dict[Hashable, TensorTarget] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in chain(parameters_of(module).items(), buffers_of(module).items()):
            if tensor is None or not is_saved(module, name):
                continue
            target = known.setdefault(same_memory(tensor), TensorTarget(tensor))
            full = plain_name(f"{prefix}.{name}" if prefix else name)
            target.names.append(full)
            target.places.append((module, name))
            targets[full] = target
    return targets


_MOST_LISTED = 20


class LoadedKeys(NamedTuple):
    """What did not meet in a model and its file."""

    missing_keys: list[str]
    """Tensors of the model that the file does not hold; they are as they were."""
    unexpected_keys: list[str]
    """Tensors of the file that the model has no place for."""


class Loading:
    """Fills a model from a file of weights, after all names and shapes have been compared.

    Args:
        model: On the CPU, a device, or `meta`, which goes to the CPU.
        dtype: Of floating tensors; None: as in the model.
    """

    may_lack: Collection[str] = ()  # what weights need not hold

    def __init__(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> None:
        self.model = unwrapped(model)
        self.targets = targets_of(self.model)
        self._dtype = dtype_of(dtype)

    def run(self, path: Path, strict: bool = False, of: Sequence[str] | None = None) -> LoadedKeys:
        """Compare, then fill.

        Args:
            path: As for `trainkit.load_checkpoint_in_model`.
            strict: Raise where names do not meet, instead of a warning.
            of: Of a checkpoint, the callback that has the weights, and the key of its state.
        """
        with open_weights(path, of) as stored:
            keys = self._compare(path, stored, strict)
            self.take(stored)
        return keys

    def take(self, stored: Mapping[str, Stored]) -> None:
        """Fill, with what fits."""
        for name, target in self.unique():
            source = next((stored[one] for one in target.names if one in stored), None)
            self.fill(name, target, source)
        self.finish()

    def fill(self, name: str, target: TensorTarget, source: Stored | None) -> None:
        """Read one tensor; it stays as it is where the file does not hold it."""
        if source is not None:
            meta, device = target.tensor.is_meta, target.tensor.device
            self.read(target, source, torch.device("cpu") if meta else device)

    def finish(self) -> None:
        """Do what is left when all tensors are read, while the file is open."""

    def read(self, target: TensorTarget, source: Stored, device: torch.device) -> None:
        """Fill a tensor, of which each process may hold a part."""
        value = source.read(held_part(target.tensor))
        target.fill(value.to(self.wanted(target.tensor)), device)

    def unique(self) -> Iterable[tuple[str, TensorTarget]]:
        """Yield each tensor under the first of its names."""
        return ((name, target) for name, target in self.targets.items() if target.names[0] == name)

    def wanted(self, tensor: Tensor) -> torch.dtype:
        """Return the dtype that a tensor is to have."""
        is_cast = self._dtype is not None and tensor.is_floating_point()
        return self._dtype if is_cast and self._dtype is not None else tensor.dtype

    def _compare(self, path: Path, stored: Mapping[str, Stored], strict: bool) -> LoadedKeys:
        missing = [
            n
            for n, target in self.unique()
            if not any(one in stored or one in self.may_lack for one in target.names)
        ]
        unexpected = [name for name in stored if name not in self.targets]
        pairs = (
            (n, stored[n].shape, tuple(s.tensor.shape))
            for n, s in self.targets.items()
            if n in stored
        )
        shapes = [
            f"`{name}`: {list(there)} in the file, {list(here)} in the model"
            for name, there, here in pairs
            if there != here
        ]
        names = [
            *_section("The file does not hold", missing),
            *_section("The model has no place for", unexpected),
        ]
        if shapes or (strict and names):
            problems = [*_section("Shapes differ", shapes), *names]
            listed = "\n".join(problems)
            raise CheckpointError(f"`{path}` does not fit the model:\n{listed}", path=path)
        if names:
            listed = "\n".join(names)
            warnings.warn(f"`{path}` was loaded in part:\n{listed}", stacklevel=4)
        return LoadedKeys(missing, unexpected)


def _section(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = [f"  - and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    shown = [f"  - {name if '`' in name else f'`{name}`'}" for name in names[:_MOST_LISTED]]
    return [f"{title}:", *shown, *more]


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype, also by its name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    named = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(named, torch.dtype):
        raise ConfigError(
            f'`dtype` must be a dtype of torch or its name, such as "bfloat16", but is {dtype!r}.'
        )
    return named
