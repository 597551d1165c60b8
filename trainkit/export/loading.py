"""Fill a model from files of weights, wherever it is to live."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.checkpoint.format.manifest import read_manifest
from trainkit.checkpoint.format.names import MANIFEST
from trainkit.checkpoint.resharding.sharding_spec import held_part, is_sharded
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export.devices import (
    DeviceMap,
    Place,
    device_of,
    infer_device_map,
    places_of,
    prefix_of,
)
from trainkit.export.offload import align_devices, offload, read_back, write_offloaded
from trainkit.export.sources import Stored, open_weights
from trainkit.export.state import unwrapped
from trainkit.export.targets import TensorTarget, targets_of
from trainkit.types import Size

__all__ = [
    "LoadedKeys",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_evaluated",
]

_MOST_LISTED = 20


class LoadedKeys(NamedTuple):
    """What did not meet in a model and its file."""

    missing_keys: list[str]
    """Tensors of the model that the file does not hold; they are as they were."""
    unexpected_keys: list[str]
    """Tensors of the file that the model has no place for."""


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Place | DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = False,
) -> LoadedKeys:
    """Load weights into a model, one tensor at a time.

    Nothing is loaded before all names and shapes have been compared. A tensor of a tied group may
    stand in the file under any of its names. Each process of a sharded model reads
    its own part.

    Args:
        model: Any module; on the CPU, a device, or `meta` (see `init_empty_weights`).
        checkpoint: A `.safetensors` file, one that `torch.save` wrote, an index, a folder with
            one of them, or a checkpoint of trainkit's.
        device_map: None: every tensor stays where it is, and those on `meta` go to the CPU. A
            device such as "cpu", "cuda:0" or 0: all go there. A mapping from modules to devices.
            What is on "disk" is fetched before a module's forward and given up after it, for
            inference; so is what is on "cpu" where there is another device in the map.
        offload_folder: Where what is on "disk" is kept as long as the model lives.
        dtype: Of floating tensors, such as `torch.bfloat16` or "bfloat16"; None: as in the model.
        strict: Raise where names do not meet, instead of a warning.

    Raises:
        CheckpointError: A shape, or with `strict` a name, does not fit: all are listed. Or a file
            is missing, broken or refused.
        ConfigError: `device_map`, `dtype` or `offload_folder` cannot work.
    """
    return _Loading(model, device_map, offload_folder, dtype).run(Path(checkpoint), strict)


def load_checkpoint_and_dispatch(  # noqa: PLR0913  the names that Accelerate documents
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Literal["auto"] | Place | DeviceMap | None = None,
    max_memory: Mapping[int | str, Size] | None = None,
    no_split_module_classes: Iterable[str] | None = None,
    offload_folder: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    preload_module_classes: Iterable[str] | None = None,
    strict: bool = False,
) -> nn.Module:
    """Load weights into a model that is spread over devices, and return it ready for inference.

    Args:
        model: Any module, usually made under `init_empty_weights`.
        checkpoint: As for `load_checkpoint_in_model`.
        device_map: "auto": made from the memory that is free, GPUs first, then the host, then the
            disk. Otherwise as for `load_checkpoint_in_model`.
        max_memory: For "auto": memory by number of the GPU and "cpu", such as `{0: "10GB"}`.
        no_split_module_classes: For "auto": names of classes whose modules stay on one device;
            None: those that a model of transformers names.
        offload_folder: Where what is on "disk" is kept.
        dtype: Of floating tensors; None: as in the model.
        preload_module_classes: Names of classes whose modules fetch all that is below them at
            once, because their forward uses the tensors of their children itself.
        strict: Raise where names do not meet, instead of a warning.

    Raises:
        CheckpointError: As for `load_checkpoint_in_model`.
        ConfigError: As for `load_checkpoint_in_model`.
    """
    if no_split_module_classes is None:
        no_split_module_classes = getattr(unwrapped(model), "_no_split_modules", None) or ()
    if device_map == "auto":
        device_map = infer_device_map(
            unwrapped(model),
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=_dtype_of(dtype),
        )
    whole = frozenset(preload_module_classes or ())
    loading = _Loading(model, device_map, offload_folder, dtype, whole)
    loading.run(Path(checkpoint), strict)
    return model


def load_evaluated(model: nn.Module, checkpoint: Path, of: Sequence[str] | None = None) -> None:
    """Load the weights that the evaluation of a checkpoint looked at, such as the average of `EMA`.

    `of` is the callback that has them, and the key of its state; else what the checkpoint tells.
    Where it is broken, does not fit, or has no such callback, CheckpointError is raised.
    """
    model.state_dict()  # shards what a forward has gathered
    is_ours = (checkpoint / MANIFEST).is_file()
    told = read_manifest(checkpoint).metadata if is_ours else {}
    loading = _Loading(model, None, None, None)
    loading.may_lack = told.get("reference", {}).get("digests", {})  # the model has its base
    loading.run(checkpoint, strict=True, of=told.get("evaluated_weights") if of is None else of)


class _Loading:
    may_lack: Collection[str] = ()  # what weights need not hold

    def __init__(
        self,
        model: nn.Module,
        device_map: Place | DeviceMap | None,
        offload_folder: str | Path | None,
        dtype: torch.dtype | str | None,
        whole_classes: frozenset[str] = frozenset(),
    ) -> None:
        if device_map == "auto":
            raise ConfigError(
                '`device_map="auto"` is for `load_checkpoint_and_dispatch`. Pass a device or a '
                "mapping here."
            )
        self._model = unwrapped(model)
        self._targets = targets_of(self._model)
        self._places = places_of(device_map, self._targets)
        self._folder = None if offload_folder is None else Path(offload_folder)
        self._dtype = _dtype_of(dtype)
        self._whole_classes = whole_classes
        devices = [device_of(p) for p in self._places.values() if p != "disk"]
        others = [device for device in devices if device.type != "cpu"]
        self._main = others[0] if others else torch.device("cpu")
        self._offloads_host = bool(others)
        if "disk" in self._places.values() and self._folder is None:
            raise ConfigError(
                'A part of the model goes to "disk" by `device_map`, but `offload_folder` is not '
                "given. Pass a folder for it."
            )
        self._check_ties()

    def _check_ties(self) -> None:
        for name, target in self._unique():
            places = [self._mapped_place(one) for one in target.names]
            runs = {str(self._runs_on(place)) for place in places if place is not None}
            if len(runs) > 1:
                raise ConfigError(
                    f"`device_map` runs the modules of `{name}` and `{target.names[-1]}` on "
                    "different devices, but their tensors are tied. Put them on one device."
                )

    def run(self, path: Path, strict: bool, of: Sequence[str] | None = None) -> LoadedKeys:
        """Compare, fill, and put up the hooks."""
        with open_weights(path, of) as stored:
            keys = self._compare(path, stored, strict)
            on_disk: dict[str, tuple[TensorTarget, Stored]] = {}
            in_memory: dict[str, tuple[TensorTarget, Stored]] = {}
            for name, target in self._unique():
                source = next((stored[one] for one in target.names if one in stored), None)
                place = self._mapped_place(name)
                if source is None:
                    self._move(target, place)
                elif place == "disk":
                    on_disk[name] = (target, source)
                elif self._is_held(place):
                    in_memory[name] = (target, source)
                else:
                    device = self._device(target, place)
                    part = held_part(target.tensor)
                    target.fill(source.read(part).to(self._wanted(target.tensor)), device)
            self._offload(on_disk, in_memory)
        if len(set(map(str, self._places.values()))) > 1:
            align_devices(self._model, {n: self._runs_on(p) for n, p in self._places.items()})
        return keys

    def _compare(self, path: Path, stored: Mapping[str, Stored], strict: bool) -> LoadedKeys:
        missing = [
            n
            for n, target in self._unique()
            if not any(one in stored or one in self.may_lack for one in target.names)
        ]
        unexpected = [name for name in stored if name not in self._targets]
        pairs = (
            (n, stored[n].shape, tuple(s.tensor.shape))
            for n, s in self._targets.items()
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

    def _unique(self) -> Iterable[tuple[str, TensorTarget]]:
        return ((name, target) for name, target in self._targets.items() if target.names[0] == name)

    def _mapped_place(self, name: str) -> Place | None:
        prefix = prefix_of(name, self._places)
        return None if prefix is None else self._places[prefix]

    def _is_held(self, place: Place | None) -> bool:
        """Return whether a place is the host, and modules run elsewhere."""
        return place is not None and self._offloads_host and device_of(place).type == "cpu"

    def _runs_on(self, place: Place) -> torch.device:
        return self._main if place == "disk" or self._is_held(place) else device_of(place)

    def _device(self, target: TensorTarget, place: Place | None) -> torch.device:
        if place is not None:
            return device_of(place)
        return torch.device("cpu") if target.tensor.is_meta else target.tensor.device

    def _move(self, target: TensorTarget, place: Place | None) -> None:
        """Let a tensor that the file does not hold follow the map; it keeps its values."""
        if place is not None and not target.tensor.is_meta and not is_sharded(target.tensor):
            target.fill(target.tensor.detach(), self._runs_on(place))

    def _wanted(self, tensor: Tensor) -> torch.dtype:
        is_cast = self._dtype is not None and tensor.is_floating_point()
        return self._dtype if is_cast and self._dtype is not None else tensor.dtype

    def _offload(
        self,
        on_disk: Mapping[str, tuple[TensorTarget, Stored]],
        in_memory: Mapping[str, tuple[TensorTarget, Stored]],
    ) -> None:
        reads = {}
        for name, (target, source) in in_memory.items():
            value = source.read().to(self._wanted(target.tensor))
            reads[name] = (target, value.detach, self._main)
        if on_disk:
            assert self._folder is not None
            written = {}
            for name, (target, source) in on_disk.items():
                kind = self._wanted(target.tensor)
                like = torch.empty_like(target.tensor, device="meta", dtype=kind)
                written[name] = (like, partial(_read_as, source, kind))
            read = read_back(write_offloaded(self._folder, written))
            for name, (target, _) in on_disk.items():
                reads[name] = (target, partial(read, name), self._main)
        offload(self._model, reads, self._whole_classes)


def _read_as(source: Stored, dtype: torch.dtype) -> Tensor:
    return source.read().to(dtype)


def _section(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = [f"  - and {len(names) - _MOST_LISTED} more"] if len(names) > _MOST_LISTED else []
    shown = [f"  - {name if '`' in name else f'`{name}`'}" for name in names[:_MOST_LISTED]]
    return [f"{title}:", *shown, *more]


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f'`dtype` must be a dtype of torch or its name, such as "bfloat16", but is {dtype!r}.'
        )
    return found
