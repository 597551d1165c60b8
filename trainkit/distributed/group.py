"""Join the process group of a job, or make it, and leave it."""

import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.distributed import ProcessGroup

from trainkit.basics.device import (
    accelerator_count,
    can_bind,
    check_present,
    collective_backend,
    default_kind,
    is_accelerator,
)
from trainkit.basics.torch_internals import begun_collectives, group_backends, set_backend_timeout
from trainkit.distributed.world import World
from trainkit.errors import ConfigError, DistributedError, by_process

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from trainkit.distributed.rendezvous import Rendezvous

SECRET = "TRAINKIT_SECRET"
"""Environment variable with a word that only the processes of one job know."""

# Processes that gloo connects all to all at the start. More would cost each of them too much; fewer
# gain nothing from connecting later, where gloo aborts if a group ends while another one connects.
_LARGEST_MESH = 64

DEBUG = "TRAINKIT_DEBUG"
"""Environment variable; with 1, torch compares every collective of all processes, which is slow."""


_OTHER_DESCRIPTORS = 128  # of a process, besides connections to the others


@dataclass(slots=True)
class Membership:
    """The part of this process in a job.

    Nothing else in trainkit may hold the groups: `leave` ends their threads by giving them up.

    Args:
        owned: Whether trainkit made the default process group and has to destroy it.
        control: A gloo group of all processes, for whatever is on the CPU; None on one process.
        default: The default process group; None if there is none.
        timeout: How long a collective may wait; None: nobody has said it.
    """

    world: World
    owned: bool = False
    control: ProcessGroup | None = None
    default: ProcessGroup | None = None
    timeout: timedelta | None = None
    moving: ProcessGroup | None = None  # for what is on the device; None: the default one

    def lives(self) -> bool:
        """Return whether the default group is still the one that was joined."""
        return _default_group() is self.default

    def position(self) -> tuple[int, ...] | None:
        """Return how many collectives this process has begun in each group; None without one."""
        groups = (self.default, self.control)
        backends = [b for group in groups if group is not None for b in group_backends(group)]
        numbers = map(begun_collectives, backends)
        return tuple(numbers) if backends and self.lives() else None

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives of the groups raise after `timeout`, from the next one on."""
        for group in (self.default, self.control):
            if group is not None and self.control is not None:
                set_group_timeout(group, timeout)
        self.timeout = timeout

    def leave(self) -> None:
        """Destroy the groups that trainkit made, and wait for the end of their threads.

        A gloo thread keeps the tensors of a collective a moment longer than its caller waits, and
        needs the interpreter to let go of them. One that does so while the interpreter ends
        aborts the process. Threads end when nothing refers to their group any more, which
        `destroy_process_group` alone does not bring about.
        """
        if self.control is None:
            return
        default, control = self.default, self.control
        owned = [default, control] if self.owned and default is not None else [control]
        backends = [backend for group in owned for backend in group_backends(group)]
        if self.lives():
            torch.distributed.destroy_process_group(None if self.owned else control)
        self.default = self.control = self.moving = None
        del default, control, owned
        gc.collect()  # a DistributedDataParallel is part of cycles, and holds the default group
        # Groups wait for their threads while they hold the interpreter lock in older versions of
        # torch, and threads wait for the lock; backends let go of it. The default one is first:
        # its end frees processes that wait for this one in it.
        while backends:
            del backends[0]


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Let collectives of a group raise after `timeout`, from the next one on."""
    for backend in group_backends(group):
        if not set_backend_timeout(backend, timeout):
            raise ConfigError(
                f"The time-out of collectives cannot be changed on a `{type(backend).__name__}`. "
                "Give it to `torch.distributed.init_process_group(timeout=...)`, which made it."
            )


def default_device(world: World, device: torch.device | None = None) -> torch.device:
    """Return the device of this process: `device`, or an accelerator of its own, or the CPU."""
    if device is None:
        device = torch.device(default_kind())
    check_present(device)
    if not is_accelerator(device) or device.index is not None:
        return device
    from trainkit.basics import starters  # importing trainkit needs none of it

    count = accelerator_count()
    if count == 1 and starters.sees_own_devices(os.environ):
        return torch.device(device.type, 0)
    if world.local_rank >= count:
        raise ConfigError(
            f"Process {world.local_rank} of this machine has no accelerator of its own: there are "
            f"{count} for {world.local_size} processes. Start at most {count} processes on this "
            'machine, or pass `device="cpu"`, which in a `Trainer` the strategy takes.'
        )
    return torch.device(device.type, world.local_rank)


def join(device: torch.device | None) -> tuple[Membership, torch.device]:
    """Adopt the process group that exists, else make one if there is more than one process."""
    adopted = _default_group() is not None
    world = World.current()
    device = default_device(world, device)
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    if world.size == 1:
        return Membership(world, default=_default_group()), device
    if not torch.distributed.is_available():
        raise ConfigError(
            f"The environment variable `WORLD_SIZE` asks for {world.size} processes, but this "
            "build of torch has no `torch.distributed`. Install another build, or start one "
            "process."
        )
    if os.environ.get(DEBUG, "0") not in ("", "0"):
        debugging: Any = torch.distributed  # not all of its names are declared
        debugging.set_debug_level(debugging.DebugLevel.DETAIL)
    _raise_descriptor_limit(world.size)
    if not adopted:
        _make(world, device)
    control = cpu_group()
    _check_secret(control, world)
    membership = Membership(world, owned=not adopted, control=control, default=_default_group())
    return membership, device


def cpu_group() -> ProcessGroup:
    """Return a new group of all processes for what is on the CPU, connected; each must call it."""
    from trainkit.distributed.gloo_listeners import closed_to_strangers  # on demand

    with closed_to_strangers():
        group: ProcessGroup = torch.distributed.new_group(backend="gloo")
    # Without it a process that ends at once closes its sockets while others still connect.
    torch.distributed.barrier(group)
    return group


def _check_secret(control: ProcessGroup, world: World) -> None:
    """Make sure that all who have joined were started by one launcher, if it made a secret.

    The numbers of all processes are added up. That of a process is never the same again, and
    nobody knows it who does not know the secret.
    """
    secret = os.environ.get(SECRET, "").encode()[:64]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT"), _rendezvous().groups
    digests = (
        blake2b(f"{attempt} {rank}".encode(), key=secret, digest_size=32).digest()
        for rank in range(world.size)
    )
    numbers = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int64).view(-1, 4)
    smallest = numbers[world.rank].clone()
    torch.distributed.all_reduce(smallest, group=control)
    if not torch.equal(smallest, numbers.sum(0)):
        raise DistributedError(
            f"A process that takes part in this job does not know its secret (`{SECRET}`), which "
            "`trainkit launch` gives to all that it starts: a stranger has joined in place of one "
            "of them, or something between took the variable away. Start the job again, in a "
            "network that you trust (docs/security.md)."
        )


def _raise_descriptor_limit(size: int) -> None:
    """Let this process open as many files and connections as it may."""
    try:
        import resource  # one process needs none of it
    except ModuleNotFoundError:  # Windows has no such limit
        return

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    needed = 2 * size + _OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"This process may open at most {soft} files and connections, but in a job of {size} "
            f"processes it may need {needed}. Raise the limit (`ulimit -Hn`, or `LimitNOFILE` and "
            "`--ulimit nofile` of what starts it), or start fewer processes."
        )


def on_its_own() -> Membership:
    """Return the part of a process that shares nothing with the others of its job."""
    return Membership(World(), default=_default_group())


def _default_group() -> ProcessGroup | None:
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


@cache
def _rendezvous() -> "Rendezvous":
    """Return where the processes meet, which one process needs none of."""
    from trainkit.distributed.rendezvous import Rendezvous

    return Rendezvous()


def _check_alike(store: "Store", world: World, backend: str) -> None:
    """Raise ConfigError, on all processes, where a group that they make would wait for ever."""
    debugging: Any = torch.distributed
    store.set(f"made/{world.rank}", f"{backend}, debug level {debugging.get_debug_level().name}")
    if world.is_main:
        told = [store.get(f"made/{rank}").decode() for rank in range(world.size)]
        store.set("made", by_process(told) if len(set(told)) > 1 else "")
    if differing := store.get("made").decode():
        raise ConfigError(
            f"The processes would make groups of different kinds: {differing}. Give all of them "
            f"devices of one kind, and the same `{DEBUG}` and `TORCH_DISTRIBUTED_DEBUG`."
        )


def _make(world: World, device: torch.device) -> None:
    from trainkit.distributed.gloo_listeners import LAZY, closed_to_strangers  # on demand

    if world.size > _LARGEST_MESH:
        # Each process connects to those that it talks to, when it does, and not at once to all.
        os.environ.setdefault(LAZY, "1")
    store = _rendezvous().next_store(world)
    _check_alike(store, world, collective_backend(device))
    with closed_to_strangers():
        torch.distributed.init_process_group(
            collective_backend(device),
            store=store,
            rank=world.rank,
            world_size=world.size,
            device_id=device if can_bind(device) else None,
            # NCCL has a shorter one, at which it ends the process before a watch can report.
            timeout=torch.distributed.default_pg_timeout,
        )
