"""Begin the watch of a job: the processes tell each other who they are, and connect."""

from typing import Any, Protocol

from trainkit.watchdog.connections import Address, Client, Server, open_server, reach_server
from trainkit.watchdog.exit import say
from trainkit.watchdog.stalls import Member
from trainkit.watchdog.watch import JobWatch

__all__ = ["start_watch"]


class Processes(Protocol):
    """What it takes to find the others: `trainkit.distributed.Processes`."""

    rank: int
    size: int
    is_main: bool

    def all_gather_objects(self, value: Any) -> list[Any]: ...

    def broadcast_object(self, value: Any) -> Any: ...

    def position(self) -> tuple[int, ...] | None: ...

    def barrier(self) -> None: ...


def start_watch(processes: Processes) -> JobWatch | None:
    """Return the watch of this process, at work; None where the others cannot be reached.

    Every process must call it.
    """
    me = Member.this()
    rows = processes.all_gather_objects([me.host, me.machine, me.pid, me.started])
    members = {rank: Member(*row) for rank, row in enumerate(rows)}
    links: Server | Client | None = None
    told: list[object] | None = None
    if processes.is_main:
        one_machine = len({member.machine for member in members.values()}) == 1
        try:
            links, address = open_server(processes.size, one_machine=one_machine)
            told = [list(address.hosts), address.port, address.token]
        except OSError as error:
            say(f"trainkit: process 0 cannot listen for the others: {error}.")
    told = processes.broadcast_object(told)
    if told is None:
        return None
    if links is None:
        hosts, port, token = told
        links = reach_server(Address(tuple(hosts), port, token), processes.rank)  # type: ignore[arg-type]
    if links is None:
        say(
            f"trainkit: process {processes.rank} cannot reach process 0 at {told[0]}, port "
            f"{told[1]}. If another process fails, it may wait for it until a collective times "
            "out. Allow connections between the machines."
        )
    watch = None
    if links is not None:
        watch = JobWatch(processes.rank, members, links, processes.position)
        watch.begin()
    processes.barrier()  # process 0 must not end before all have come
    return watch
