"""Some of the processes of a job, with the collectives between them."""

import atexit
from collections.abc import Sequence
from typing import Any

import torch.distributed
from torch.distributed import ProcessGroup

from trainkit.basics.device import collective_backend
from trainkit.distributed.collectives import only_this_process
from trainkit.distributed.gloo_listeners import closed_to_strangers
from trainkit.distributed.group import Membership
from trainkit.distributed.processes import Processes
from trainkit.distributed.world import World


def part_of(processes: Processes, groups: Sequence[Sequence[int]]) -> Processes:
    """Return that one of several groups in which this process is, with numbers from 0 on.

    Every process must call it with the same groups, and `close` what it returns, if it is not
    `processes` itself.

    Args:
        processes: Those of the job.
        groups: Numbers of processes; each process is in one.
    """
    mine = next(group for group in groups if processes.rank in group)
    if len(mine) == processes.size:
        return processes
    part = only_this_process(processes)
    if len(mine) > 1:
        backend = collective_backend(processes.device)
        control = _made(processes, groups, "gloo")
        membership = Membership(
            World(rank=[*mine].index(processes.rank), size=len(mine)),
            control=control,
            default=torch.distributed.group.WORLD,
            moving=control if backend == "gloo" else _made(processes, groups, backend),
        )
        part = Processes(membership, processes.device)
        atexit.register(part._close_at_exit)
    part.ranks = mine
    return part


def _made(processes: Processes, groups: Sequence[Sequence[int]], backend: str) -> ProcessGroup:
    made: Any = None
    for ranks in groups:
        with closed_to_strangers():
            group = torch.distributed.new_group([*ranks], processes.timeout, backend)
        made = group if processes.rank in ranks else made
    processes.barrier()  # a process that ends at once closes its sockets while others connect
    return made  # type: ignore[no-any-return]
