"""Load a model over devices, host memory and disk, for inference (`device_map`)."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.errors import ConfigError
from trainkit.export.loading import LoadedKeys, Loading, TensorTarget
from trainkit.export.sources import Stored
from trainkit.export.state import unwrapped
from trainkit.large_models.devices import (
    DeviceMap,
    Place,
    device_of,
    infer_auto_device_map,
    places_of,
    prefix_of,
)
from trainkit.large_models.offload import align_devices, offload, read_back, write_offloaded
from trainkit.types import Size


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Place | DeviceMap | None = None,
    offload_folder: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = False,
    offload_state_dict: bool = False,
) -> LoadedKeys:
    """Load weights into a model, one tensor at a time.

    Nothing is loaded before all names and shapes have been compared. A tensor of a tied group may
    stand in the file under any of its names. Each process of a sharded model reads its own part.

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
        offload_state_dict: Accepted; no more than one tensor is in memory twice.

    Raises:
        CheckpointError: A shape, or with `strict` a name, does not fit: all are listed. Or a file
            is missing, broken or refused.
        ConfigError: `device_map`, `dtype` or `offload_folder` cannot work.
    """
    return _Dispatch(model, device_map, offload_folder, dtype).run(Path(checkpoint), strict)


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
    offload_state_dict: bool = False,
    **others: Any,
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
        offload_state_dict: Accepted.
        **others: Names that Accelerate has, which make no difference to the values.

    Raises:
        CheckpointError: As for `load_checkpoint_in_model`.
        ConfigError: As for `load_checkpoint_in_model`.
    """
    if no_split_module_classes is None:
        no_split_module_classes = getattr(unwrapped(model), "_no_split_modules", None)
    if device_map == "auto":
        device_map = infer_auto_device_map(
            unwrapped(model), max_memory, no_split_module_classes, dtype
        )
    whole = frozenset(preload_module_classes or ())
    loading = _Dispatch(model, device_map, offload_folder, dtype, whole)
    loading.run(Path(checkpoint), strict)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: Place | DeviceMap,
    main_device: Place | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: str | Path | None = None,
    *,
    preload_module_classes: Iterable[str] | None = None,
    **others: Any,
) -> nn.Module:
    """Spread a model that is in memory over devices, and return it ready for inference.

    Args:
        model: Any module.
        device_map: As for `load_checkpoint_in_model`.
        main_device: Where runs what is on "cpu" or "disk"; None: the first device of the map.
        state_dict: Its values; None: those that it has.
        offload_dir: Where what is on "disk" is kept.
        preload_module_classes: As for `load_checkpoint_and_dispatch`.
        **others: Names that Accelerate has, which make no difference to the values.
    """
    whole = frozenset(preload_module_classes or ())
    main = None if main_device is None else device_of(main_device)
    loading = _Dispatch(model, device_map, offload_dir, None, whole, main)
    values = {name: target.tensor for name, target in loading.targets.items()} | {
        **(state_dict or {})
    }
    loading.take(
        {
            name: Stored(tuple(value.shape), partial(_part_of, value))
            for name, value in values.items()
            if not value.is_meta
        }
    )
    return model


class _Dispatch(Loading):
    """Puts each tensor where the map says; what lies on disk or host is fetched when it is run."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Place | DeviceMap | None,
        offload_folder: str | Path | None,
        dtype: torch.dtype | str | None,
        whole_classes: frozenset[str] = frozenset(),
        main: torch.device | None = None,
    ) -> None:
        if device_map == "auto":
            raise ConfigError(
                '`device_map="auto"` is for `load_checkpoint_and_dispatch`. Pass a device or a '
                "mapping here."
            )
        super().__init__(model, dtype)
        self._places = places_of(device_map, self.targets)
        self._folder = None if offload_folder is None else Path(offload_folder)
        self._whole_classes = whole_classes
        self._on_disk: dict[str, tuple[TensorTarget, Stored]] = {}
        self._in_memory: dict[str, tuple[TensorTarget, Stored]] = {}
        devices = [device_of(p) for p in self._places.values() if p != "disk"]
        others = [device for device in devices if device.type != "cpu"]
        self._main = main or (others[0] if others else torch.device("cpu"))
        self._offloads_host = bool(others) or self._main.type != "cpu"
        if "disk" in self._places.values() and self._folder is None:
            raise ConfigError(
                'A part of the model goes to "disk" by `device_map`, but `offload_folder` is not '
                "given. Pass a folder for it."
            )
        self._check_ties()

    def _check_ties(self) -> None:
        for name, target in self.unique():
            places = [self._mapped_place(one) for one in target.names]
            runs = {str(self._runs_on(place)) for place in places if place is not None}
            if len(runs) > 1:
                raise ConfigError(
                    f"`device_map` runs the modules of `{name}` and `{target.names[-1]}` on "
                    "different devices, but their tensors are tied. Put them on one device."
                )

    @override
    def fill(self, name: str, target: TensorTarget, source: Stored | None) -> None:
        place = self._mapped_place(name)
        if place is None:
            super().fill(name, target, source)
        elif source is None:  # it keeps its values, and follows the map
            if not target.tensor.is_meta and not is_sharded(target.tensor):
                target.fill(target.tensor.detach(), self._runs_on(place))
        elif place == "disk":
            self._on_disk[name] = (target, source)
        elif self._is_held(place):
            self._in_memory[name] = (target, source)
        else:
            self.read(target, source, device_of(place))

    @override
    def finish(self) -> None:
        self._offload()
        if self._places:
            setattr(self.model, "hf_device_map", dict(self._places))  # noqa: B010  mypy knows modules
        is_offloaded = self._on_disk or self._in_memory
        if is_offloaded or len(set(map(str, self._places.values()))) > 1:
            align_devices(self.model, {n: self._runs_on(p) for n, p in self._places.items()})

    def _mapped_place(self, name: str) -> Place | None:
        prefix = prefix_of(name, self._places)
        return None if prefix is None else self._places[prefix]

    def _is_held(self, place: Place | None) -> bool:
        """Return whether a place is the host, and modules run elsewhere."""
        return place is not None and self._offloads_host and device_of(place).type == "cpu"

    def _runs_on(self, place: Place) -> torch.device:
        return self._main if place == "disk" or self._is_held(place) else device_of(place)

    def _offload(self) -> None:
        reads = {}
        for name, (target, source) in self._in_memory.items():
            value = source.read().to(self.wanted(target.tensor))
            reads[name] = (target, value.detach, self._main)
        if self._on_disk:
            assert self._folder is not None
            written = {}
            for name, (target, source) in self._on_disk.items():
                kind = self.wanted(target.tensor)
                like = torch.empty_like(target.tensor, device="meta", dtype=kind)
                written[name] = (like, partial(_read_as, source, kind))
            read = read_back(write_offloaded(self._folder, written))
            for name, (target, _) in self._on_disk.items():
                reads[name] = (target, partial(read, name), self._main)
        offload(self.model, reads, self._whole_classes)


def _part_of(value: Tensor, part: Any = ...) -> Tensor:
    return value.detach()[part].to("cpu", copy=True)


def _read_as(source: Stored, dtype: torch.dtype) -> Tensor:
    return source.read().to(dtype)
