"""Device maps: which module of a model lives where."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainkit.basics.device import accelerator_count, default_kind, free_memory
from trainkit.basics.host import machine_memory
from trainkit.errors import ConfigError, quoted
from trainkit.export.layout import parse_size
from trainkit.export.loading import dtype_of, targets_of
from trainkit.types import Size

Place = int | str | torch.device
"""A device, or "disk"."""

DeviceMap = Mapping[str, Place]
"""Name of a module, parameter or buffer, "" for all, to its place."""

_MAPPED = 0.9  # of the free memory of a device; the rest is for what a forward computes


def places_of(device_map: Place | DeviceMap | None, names: Iterable[str]) -> dict[str, Place]:
    """Return a device map in its full form, after a check; {} for None.

    Args:
        names: Of the model's tensors.
    """
    if device_map is None:
        return {}
    places: dict[str, Place] = {}
    if isinstance(device_map, Mapping):
        places.update(device_map)
    else:
        places[""] = device_map
    for name, place in places.items():
        if place != "disk":
            device_of(place, name)
    lost = [name for name in names if prefix_of(name, places) is None]
    if lost:
        raise ConfigError(
            f"`device_map` gives no place to {len(lost)} tensors ({quoted(lost)}"
            '). Add their modules, or a place for `""`, which is for all that is left.'
        )
    return places


def prefix_of(name: str, places: Collection[str]) -> str | None:
    """Return the longest key that is `name`, or a module that it is in; None without one."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def device_of(place: Place, name: str = "") -> torch.device:
    """Return the device that a place names."""
    try:
        if not isinstance(place, int):
            device = torch.device(place)
        else:
            device = torch.device(default_kind(), place)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"`device_map` says {place!r} for `{name}`, but a place is a device such as "
            '"cpu", "mps" or 0, or "disk".'
        ) from error
    if device.type != default_kind() and device.type != "cpu":
        raise ConfigError(
            f"`device_map` says {place!r} for `{name}`, but this machine has no such device that "
            'torch can use. Say "cpu" or "disk".'
        )
    return device


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, Size] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: torch.dtype | str | None = None,
    **others: Any,
) -> dict[str, Place]:
    """Return a device map that fills the GPUs first, then the host, then the disk.

    Modules are placed in their order. One that does not fit where the last one went is split into
    its children, or begins the next device.

    Args:
        max_memory: Bytes, or sizes such as "10GB", by number of the GPU and "cpu"; by default
            nine tenths of what is free.
        no_split_module_classes: Names of classes whose modules stay on one device.
        dtype: Of floating tensors once they are loaded; None: as they are.
        **others: Names that Accelerate has; tensors are counted in the dtype that they have.
    """
    free = room(max_memory)
    sizes, ties = _sizes(model, dtype_of(dtype))
    given = no_split_module_classes
    unsplit = frozenset([given] if isinstance(given, str) else given or ())
    first = next(iter(free), "cpu")
    if first != "cpu" and sum(sizes.values()) > sum(v for k, v in free.items() if k != "cpu"):
        # What stays outside the GPUs visits the first one block by block.
        blocks = [
            _below(name, sizes)
            for name, module in model.named_modules()
            if type(module).__name__ in unsplit or not list(module.children())
        ]
        free[first] = max(0, free[first] - max(blocks, default=0))
    left: list[tuple[Place, int]] = [*free.items(), ("disk", 1 << 62)]
    places: dict[str, Place] = {}

    def take(name: str, needed: int) -> bool:
        """Place something where the last one went, if it fits there."""
        place, room = left[0]
        if needed <= room:
            left[0], places[name] = (place, room - needed), place
        return needed <= room

    def put(module: nn.Module, name: str) -> None:
        below = [full for full in sizes if full.startswith(f"{name}.")]
        if below and all(full in ties for full in below):  # has no tensors but those of another
            placed = prefix_of(ties[below[0]], places)
            if placed is not None:
                places[name] = places[placed]
                return
        children = list(module.named_children())
        while not take(name, _below(name, sizes)):
            if children and type(module).__name__ not in unsplit:
                for full in [full for full in sizes if full.rpartition(".")[0] == name]:
                    while not take(full, sizes[full]):
                        left.pop(0)
                for child, inner in children:
                    put(inner, f"{name}.{child}" if name else child)
                return
            left.pop(0)

    put(model, "")
    used = set(places.values())
    return {"": used.pop()} if len(used) == 1 else places


def room(max_memory: Mapping[int | str, Size] | None = None) -> dict[int | str, int]:
    """Return how many bytes may go to each place; see `max_memory` of `infer_auto_device_map`."""
    if max_memory is None:
        host = machine_memory("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
        if host is None:
            raise ConfigError(
                "This system does not say how much memory it has. Pass it as `max_memory`, such as "
                '{0: "20GB", "cpu": "50GB"}.'
            )
        gpus = range(accelerator_count())
        free: dict[int | str, int] = {i: int(free_memory(i) * _MAPPED) for i in gpus}
        return free | {"cpu": int(host * _MAPPED)}
    parsed = {
        place: convert_file_size_to_int(size, f"max_memory[{place!r}]")
        for place, size in max_memory.items()
    }
    return dict(sorted(parsed.items(), key=lambda item: (item[0] == "cpu", str(item[0]))))


def convert_file_size_to_int(size: Size, name: str = "size") -> int:
    """Return a size in bytes: "1GB" has 10**9, "1GiB" 2**30, and "1Gb" counts bits.

    Args:
        size: Such a text, or a number of bytes.
        name: Of the argument, for the error.

    Raises:
        ConfigError: It is neither.
    """
    parsed = parse_size(size, name, least=0)
    return parsed // 8 if str(size)[-1:] == "b" and str(size)[-2:-1] not in "iI" else parsed


def _below(name: str, sizes: Mapping[str, int]) -> int:
    return sum(size for full, size in sizes.items() if not name or full.startswith(f"{name}."))


def _sizes(model: nn.Module, dtype: torch.dtype | None) -> tuple[dict[str, int], dict[str, str]]:
    """Return the bytes of each tensor by name, and the first name of each that is tied to one."""
    sizes: dict[str, int] = {}
    ties: dict[str, str] = {}
    for name, target in targets_of(model).items():
        tensor, first = target.tensor, target.names[0]
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        sizes[name] = tensor.numel() * kind.itemsize if name == first else 0
        if name != first:
            ties[name] = first
    return sizes, ties
