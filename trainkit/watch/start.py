"""Begin the watch of a job: the processes find each other, and connect."""

from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.watch.connections import Address, Links, open_server, reach_server
from trainkit.watch.exit import say
from trainkit.watch.job_watch import JobWatch
from trainkit.watch.member import Member

__all__ = ["start_watch"]


class Processes(Protocol):
    """What it takes to find the others: `trainkit.distributed.Processes`."""

    rank: int
    size: int
    is_main: bool

    def all_reduce(self, tensor: Tensor, op: Any) -> Tensor: ...

    def broadcast_object(self, value: Any) -> Any: ...

    def position(self) -> tuple[int, ...] | None: ...

    def latest(self) -> str: ...

    def barrier(self) -> None: ...


def start_watch(processes: Processes) -> JobWatch | None:
    """Return the watch of this process, at work; None where the others cannot be reached.

    Every process must call it.
    """
    here = Member.this().machine
    elsewhere = torch.tensor(int(here != processes.broadcast_object(here)))
    one_machine = not processes.all_reduce(elsewhere, "max").item()
    links: Links | None = None
    watch = told = None
    if processes.is_main:
        try:
            links, address = open_server(processes.size, one_machine=one_machine)
            told = [list(address.hosts), address.port, address.token]
            watch = JobWatch(0, processes.size, links, processes.position, processes.latest)
            watch.begin()  # it serves the others
        except OSError as error:
            say(
                f"trainkit: process 0 cannot listen for the others: {error}. No process is "
                "watched: if one fails, the others may wait until a collective times out."
            )
    told = processes.broadcast_object(told)
    if told is None:
        return None
    hosts, port, token = told
    if not processes.is_main:
        address = Address(tuple(hosts), port, token)
        why = ""
        try:
            links = reach_server(address, processes.rank, processes.size, one_machine=one_machine)
        except OSError as error:
            why = f": {error}"
        if links is None:
            say(
                f"trainkit: process {processes.rank} cannot reach process 0 at {hosts}, port "
                f"{port}{why}. If another process fails, it may wait for it until a collective "
                "times out. Allow connections between the machines, and enough open files."
            )
        else:
            watch = JobWatch(
                processes.rank, processes.size, links, processes.position, processes.latest
            )
            watch.begin()
    processes.barrier()  # process 0 must not end before all have come
    return watch
