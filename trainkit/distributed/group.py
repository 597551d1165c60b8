"""Join the process group of a job, or make it."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainkit.errors import ConfigError
from trainkit.world import World

__all__ = ["INIT_METHOD", "Membership", "default_device", "join"]

INIT_METHOD = "TRAINKIT_INIT_METHOD"
"""Environment variable with the rendezvous to use instead of `env://`."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The part of this process in a job.

    Args:
        world: The place of this process.
        owned: Whether trainkit made the default process group and has to destroy it.
        control: A gloo group of all processes, for votes and metadata; None on one process.
        default: The default process group; None if there is none.
        reaches_cpu: Whether the default group can reduce tensors on the CPU.
    """

    world: World
    owned: bool = False
    control: ProcessGroup | None = None
    default: ProcessGroup | None = None
    reaches_cpu: bool = True

    def lives(self) -> bool:
        """Return whether the default group is still the one that was joined."""
        return _default_group() is self.default

    def leave(self) -> None:
        """Destroy the groups that trainkit made."""
        if self.control is None or not self.lives():
            return
        torch.distributed.destroy_process_group(None if self.owned else self.control)


def default_device(world: World, device: torch.device | None = None) -> torch.device:
    """Return the device of this process: `device`, or its own CUDA device, or the CPU."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" or device.index is not None:
        return device
    count = torch.cuda.device_count()
    if world.local_rank >= count:
        raise ConfigError(
            f"Process {world.local_rank} of this machine has no CUDA device of its own: there are "
            f"{count} for {world.local_size} processes. Start at most {count} processes on this "
            'machine, or pass `device=torch.device("cpu")`.'
        )
    return torch.device("cuda", world.local_rank)


def join(device: torch.device | None) -> tuple[Membership, torch.device]:
    """Adopt the process group that exists, else make one if there is more than one process."""
    adopted = _default_group() is not None
    world = _adopted_world() if adopted else World.from_env()
    device = default_device(world, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size == 1:
        return Membership(world, default=_default_group()), device
    if not torch.distributed.is_available():
        raise ConfigError(
            f"The environment variable `WORLD_SIZE` asks for {world.size} processes, but this "
            "build of torch has no `torch.distributed`. Install another build, or start one "
            "process."
        )
    if not adopted:
        _make(world, device)
    control = torch.distributed.new_group(backend="gloo")
    # Without it a process that ends at once closes its sockets while others still connect.
    torch.distributed.barrier(control)
    membership = Membership(
        world,
        owned=not adopted,
        control=control,
        default=_default_group(),
        reaches_cpu=torch.distributed.get_backend() != "nccl",
    )
    return membership, device


def _default_group() -> ProcessGroup | None:
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


def _adopted_world() -> World:
    """Return the place of this process in the group that exists, with torchrun's local numbers."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return World.from_env({**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)})


class _Rendezvous:
    """The key-value store of this process's job, and how many groups were made through it."""

    def __init__(self) -> None:
        self.store: Store | None = None
        self.method = ""
        self.pid = -1
        self.groups = 0

    def next_store(self, world: World) -> Store:
        """Return a store that no earlier group has written to; equal on all processes."""
        method = os.environ.get(INIT_METHOD, "env://")
        if self.store is None or (self.method, self.pid) != (method, os.getpid()):
            self.store, _, _ = next(rendezvous(method, world.rank, world.size))
            self.method, self.pid, self.groups = method, os.getpid(), 0
        self.groups += 1
        return PrefixStore(f"trainkit/{self.groups}", self.store)


_rendezvous = _Rendezvous()


def _make(world: World, device: torch.device) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and INIT_METHOD not in os.environ:
        raise ConfigError(
            f"The environment variable `WORLD_SIZE` asks for {world.size} processes, but "
            f"{' and '.join(f'`{name}`' for name in missing)} is not set, so they cannot find "
            "each other. Start the job with torchrun, or unset `WORLD_SIZE`."
        )
    on_cuda = device.type == "cuda"
    # NCCL has no Windows or macOS build; where it is missing gloo moves CUDA tensors, slowly.
    nccl = on_cuda and torch.distributed.is_nccl_available()
    torch.distributed.init_process_group(
        "nccl" if nccl else "gloo",
        store=_rendezvous.next_store(world),
        rank=world.rank,
        world_size=world.size,
        device_id=device if nccl else None,
    )


def failed() -> bool:
    """Return whether the interpreter is on its way out because of an exception."""
    return hasattr(sys, "last_value")
