"""How many processes hold a model together, in Accelerate's words."""

import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from trainkit.basics.config import check_whole
from trainkit.distributed.world import World
from trainkit.errors import ConfigError
from trainkit.strategies import DDP, FSDP, Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # of a mesh; neighbours are last


def _product(*axes: str) -> Any:
    return property(lambda self: prod(getattr(self, f"{axis}_size") for axis in axes))


def _enabled(axis: str) -> Any:
    return property(lambda self: getattr(self, f"{axis}_size") > 1)


def _names(*axes: str) -> Any:
    return property(lambda self: [axis for axis in axes if getattr(self, f"{axis}_enabled")])


@dataclass
class TorchContextParallelConfig:
    """How processes see the keys of each other's pieces: "allgather", the only way there is."""

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        said = os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
        self.cp_comm_strategy = self.cp_comm_strategy or said
        if self.cp_comm_strategy != "allgather":
            raise ConfigError(
                f'`cp_comm_strategy` must be "allgather", but is {self.cp_comm_strategy!r}. Leave '
                "it out: keys travel once in each layer, and nothing is sent round."
            )


@dataclass
class ParallelismConfig:
    """The sizes of the groups of processes. None: what a launcher says, else 1.

    `Accelerator` trains by the first two: `dp_shard_size` is `FSDP()`, and `dp_replicate_size` its
    `replicas`, or DDP where nothing is sharded. Together, and with `cp_size`, they are all
    processes.

    Args:
        dp_replicate_size: Groups that hold a whole model each.
        dp_shard_size: Processes of such a group, each with a part of the model and its own data.
        tp_size: Processes that compute each layer together; `Accelerator` refuses it.
        cp_size: Processes that compute each sequence together, as `context_parallel` of `DDP` and
            `FSDP` says; FSDP shards a model over them too.
        cp_backend: "torch".
        sp_size: The same in DeepSpeed's way, which `Accelerator` refuses.
        sp_backend: "deepspeed".
        tp_handler: More of `tp_size`.
        cp_handler: More of `cp_size`.
        sp_handler: More of `sp_size`.

    Raises:
        ConfigError: A size is no whole number from 1 on, or a back end is another.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    dp_replicate_enabled, dp_shard_enabled = _enabled("dp_replicate"), _enabled("dp_shard")
    tp_enabled, cp_enabled, sp_enabled = _enabled("tp"), _enabled("cp"), _enabled("sp")
    dp_dim_names = _names("dp_replicate", "dp_shard")
    non_dp_dim_names = _names("tp", "cp", "sp")
    active_mesh_dims = _names(*_AXES)
    dp_shard_cp_dim_names = _names("dp_shard", "cp")
    dp_cp_dim_names = _names("dp_replicate", "dp_shard", "cp")
    data_parallel_size = _product("dp_replicate", "dp_shard")
    non_data_parallel_size = _product("tp", "cp", "sp")
    total_size = _product(*_AXES)

    def __post_init__(self) -> None:
        self.device_mesh: DeviceMesh | None = None  # what `get_device_mesh` has made
        usual = {f"{axis}_size": "1" for axis in _AXES}
        backends = {"cp_backend": "torch", "sp_backend": "deepspeed"}
        for name, default in {**usual, **backends}.items():
            value = getattr(self, name)
            if value is None:
                value = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}") or default
                value = int(value) if value.isdecimal() else value
            if name in usual:
                check_whole(name, value)
            elif value != default:
                raise ConfigError(f'`{name}` must be "{default}", but is {value!r}.')
            setattr(self, name, value)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes that hold a model together; "dp_shard_cp" is Accelerate's join of two."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    def build_device_mesh(self, device_type: str) -> "DeviceMesh | None":
        """Return a mesh of the axes that are larger than 1; None without one, or with `sp_size`.

        All processes must call it. Joined axes have no name: `mesh["dp_replicate", "dp_shard"]`.
        """
        from torch.distributed.device_mesh import init_device_mesh

        names = tuple(axis for axis in _ORDER if axis in self.active_mesh_dims)
        if not names or self.sp_enabled:
            return None
        sizes = tuple(getattr(self, f"{axis}_size") for axis in names)
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)

    def get_device_mesh(self, device_type: str | None = None) -> "DeviceMesh | None":
        """Return the mesh, made at the first call; that one needs to know the type of device."""
        made = self.device_mesh
        if made is None and device_type is not None:
            made = self.device_mesh = self.build_device_mesh(device_type)
        elif made is None or device_type not in (None, made.device_type):
            raise ConfigError(
                "`get_device_mesh` makes a mesh once, for one type of device, but got "
                f"{device_type!r} where it has {made}. Pass the type that the processes have."
            )
        return made

    def strategy(self, given: Strategy | None) -> Strategy | None:
        """Return the strategy of these sizes, made of the one that was chosen beside them."""
        processes = World.from_env().size
        if others := [axis for axis in self.non_dp_dim_names if axis != "cp"]:
            raise ConfigError(
                f"`Accelerator` cannot train with {' and '.join(others)} above 1 "
                "in `ParallelismConfig`: it makes no model parallel. Shard by `dp_shard_size`, or "
                "load the model parallel, and pass `strategy=ModelParallel()` of "
                "`trainkit.strategies` in place of the configuration."
            )
        if self.total_size == 1:
            if given is None:
                self.dp_replicate_size = processes
            return given
        if processes != self.total_size:
            raise ConfigError(
                "`dp_replicate_size` times `dp_shard_size` must be the number of processes, but is "
                f"{self.dp_replicate_size} times {self.dp_shard_size} on {processes}"
                f"{f', with a `cp_size` of {self.cp_size}' * self.cp_enabled}. Change them, "
                "or leave both out."
            )
        shards = self.dp_shard_enabled or (self.cp_enabled and isinstance(given, FSDP))
        if given is not None and shards != isinstance(given, FSDP):
            raise ConfigError(
                f"`dp_shard_size` is {self.dp_shard_size}, but the strategy is `{given.name}`. "
                "Leave one of the two out."
            )
        if self.cp_enabled:
            given = given or (FSDP() if shards else DDP())
            if type(given) not in (DDP, FSDP) or given.context_parallel not in (1, self.cp_size):
                raise ConfigError(
                    f"`cp_size` is {self.cp_size}, but the strategy `{given.name}` says otherwise. "
                    "Leave one of the two out."
                )
            given.context_parallel = self.cp_size or 1
        if not shards:
            return given
        chosen = given if isinstance(given, FSDP) else FSDP()
        if chosen.replicas not in (1, self.dp_replicate_size):
            raise ConfigError(
                f"`dp_replicate_size` is {self.dp_replicate_size}, but the strategy has "
                f"`replicas={chosen.replicas!r}`. Say one of the two."
            )
        chosen.replicas = self.dp_replicate_size
        return chosen
