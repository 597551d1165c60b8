"""How a model that comes parallel lies over the processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.basics.torch_internals import sharded_groups
from trainkit.checkpoint.resharding.sharding_spec import first_meshes, is_sharded
from trainkit.distributed import Processes, run_on_all
from trainkit.errors import ConfigError, quoted
from trainkit.types import class_name

Ranks = tuple[int, ...]
_ONE_MESH = (
    " Make one mesh of all processes, `init_device_mesh(device, sizes, mesh_dim_names=names)`, and "
    "give its dimensions to `fully_shard` and `parallelize_module`."
)


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """Which processes share what; each is in one group of both kinds.

    Attributes:
        data: Groups whose processes have samples of their own, and the same part of a tensor group.
        tensor: Groups whose processes see the same samples, and hold one model together.
    """

    data: tuple[Ranks, ...]
    tensor: tuple[Ranks, ...]

    def holders(self, tensor: Any) -> Ranks:
        """Return, of each process, the first one that holds the same part of a tensor."""
        size = sum(map(len, self.data))
        if not is_sharded(tensor):
            return (0,) * size
        mesh = tensor.device_mesh
        ranks = mesh.mesh.flatten().tolist()
        first = torch.arange(len(ranks)).view(mesh.mesh.shape)
        for dim, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                first = first.narrow(dim, 0, 1).expand_as(first)
        holders = first.flatten().tolist()
        rows = self.parallel(ranks)
        first_holder = {row[i]: rows[0][holder] for row in rows for i, holder in enumerate(holders)}
        return tuple(first_holder[rank] for rank in range(size))

    def parallel(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return the processes of a mesh, and of all that lie beside it, the first one first."""
        if len(ranks) == sum(map(len, self.data)):
            return [[*ranks]]
        for groups in (self.tensor, self.data):
            own = next(group for group in groups if ranks[0] in group)
            if {*own} == {*ranks}:
                order = [own.index(rank) for rank in ranks]
                return [[group[index] for index in order] for group in groups]
        raise ValueError(f"the mesh of {[*ranks]} is none of the layout")


def find_layout(model: nn.Module, processes: Processes) -> MeshLayout:
    """Return the layout of a model; every process must call it.

    Raises:
        ConfigError: It has none, it does not fit the processes, or its meshes contradict.
    """
    size, name = processes.size, class_name(model)
    data, tensor = run_on_all(processes, lambda: _own_groups(model, size))
    layouts = processes.all_gather_objects([[*data], [*tensor]])
    groups = _partition([tuple(each[0] or each[1]) for each in layouts], size, name)
    others = tuple(zip(*groups, strict=True))
    layout = MeshLayout(groups, others) if data else MeshLayout(others, groups)
    run_on_all(processes, lambda: _note_first(model, layout))
    return layout


def _own_groups(model: nn.Module, size: int) -> tuple[Ranks, Ranks]:
    """Return the data group of this process, else its tensor group; the other one is empty."""
    by_data = sorted({_ranks(mesh) for mesh, _ in sharded_groups(model)}, key=len)
    groups = by_data or sorted({_ranks(mesh) for _, mesh in _meshes(model)}, key=len)
    if not groups and size == 1:
        return (0,), ()
    if not groups:
        raise ConfigError(
            f'`strategy="model_parallel"` trains a model that is parallel already, but the '
            f"parameters of `{class_name(model)}` are whole on every process. Make it parallel "
            "first (`parallelize_module`, `fully_shard`, or `distributed_config` of "
            '`from_pretrained`), or use `strategy="ddp"` or `"fsdp"`.'
        )
    *others, largest = groups
    if any(not {*each} <= {*largest} for each in others):
        raise ConfigError(
            f"`{class_name(model)}` lies on meshes that do not fit together: one of the processes "
            f"{[*others[0]]}, one of {[*largest]}.{_ONE_MESH}"
        )
    return (largest, ()) if by_data else ((), largest)


def _meshes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    yield from ((name, tensor.device_mesh) for name, tensor in tensors if is_sharded(tensor))  # type: ignore[attr-defined]


def _ranks(mesh: Any) -> Ranks:
    return tuple(mesh.mesh.flatten().tolist())


def _partition(of_each: Sequence[Ranks], size: int, name: str) -> tuple[Ranks, ...]:
    """Return the groups that the processes say they are in, where each is in one."""
    groups = sorted({*of_each})
    members = sorted(rank for group in groups for rank in group)
    if members != [*range(size)] or len({*map(len, groups)}) > 1:
        told = quoted([", ".join(map(str, group)) for group in groups])
        raise ConfigError(
            f"The meshes of `{name}` are of the processes {told}, and do not divide the {size} of "
            f"this job into equal groups.{_ONE_MESH}"
        )
    return tuple(groups)


def _note_first(model: nn.Module, layout: MeshLayout) -> None:
    """Tell those who save which processes come first; raise where a mesh is none of the layout."""
    for name, mesh in _meshes(model):
        own = _ranks(mesh)
        try:
            first_meshes[mesh] = torch.tensor(layout.parallel(own)[0]).view(mesh.mesh.shape)
        except ValueError:
            raise ConfigError(
                f"`{name}` of `{class_name(model)}` lies on a mesh of the processes {[*own]}, but "
                f"those that hold a model together are {[*layout.tensor[0]]}, and so on.{_ONE_MESH}"
            ) from None
