"""Act so that all processes learn of a failure, instead of waiting for one that has left."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed

from trainkit import errors
from trainkit.distributed.processes import Processes

__all__ = ["apart", "on_main", "together"]


def together(processes: Processes, action: Callable[[], Any]) -> None:
    """Run `action` on every process; if it raises on one, raise on all.

    Every process must call it. The others raise the same kind of error, with its text.
    """
    failure: BaseException | None = None
    try:
        action()
    except Exception as error:
        failure = error
    told = None if failure is None else [type(failure).__name__, str(failure)]
    reports = processes.all_gather_objects(told)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            kind, text = report
            theirs = _class_of(kind)(f"On process {rank}: {text}")
            theirs.origin = rank
            raise theirs


def on_main(processes: Processes, action: Callable[[], Any]) -> None:
    """Run `action` on process 0; if it raises, raise on all."""
    together(processes, action if processes.is_main else lambda: None)


def apart(processes: Processes) -> Processes:
    """Return the same processes with a CPU group of their own, for another thread.

    Every process must call it, and `close` what it returns.
    """
    if processes.control is None:
        return processes
    group = torch.distributed.new_group(backend="gloo")
    torch.distributed.barrier(group)
    membership = dataclasses.replace(processes._membership, owned=False, control=group)
    return Processes(membership, processes.device)


def _class_of(kind: str) -> type[errors.TrainkitError]:
    found = getattr(errors, kind, None)
    return found if found is not None else errors.DistributedError
