"""Act so that all processes learn of a failure, instead of waiting for one that has left."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed

from trainkit import errors
from trainkit.distributed import collective_guard
from trainkit.distributed.group import Membership
from trainkit.distributed.processes import Processes
from trainkit.distributed.world import World

if TYPE_CHECKING:
    from trainkit.watchdog.callers import Callers

__all__ = [
    "check_called_by_all",
    "only_this_process",
    "run_and_gather",
    "run_on_all",
    "run_on_all_or_main",
    "run_on_main",
    "with_own_group",
]

R = TypeVar("R", str, None)  # what can travel to processes that take no part
T = TypeVar("T")
U = TypeVar("U")

# Places of `collective_guard.only` that the other processes never come to.
_ON_MAIN = ("on_main_process", "on_process")


def run_on_all(processes: Processes, action: Callable[[], T]) -> T:
    """Run `action` on every process, and return its result there; if it raises on one, on all.

    Every process must call it. The others raise the same kind of error, with its text.
    """
    return run_and_gather(processes, lambda: (action(), None))[0]


def run_on_main(processes: Processes, action: Callable[[], T]) -> T:
    """Run `action` on process 0, and return its result on all; if it raises, raise on all.

    The result must be able to travel, as in `all_gather_objects`.
    """
    _, results = run_and_gather(processes, lambda: (None, action() if processes.is_main else None))
    return cast("T", results[0])


def run_and_gather(processes: Processes, action: Callable[[], tuple[T, U]]) -> tuple[T, list[U]]:
    """Do the same as `run_on_all` with an `action` that returns what stays and what travels.

    It makes one collective. What travels must be able to, as in `all_gather_objects`.

    Returns:
        What stays of this process's result, and what travels of that of each process.
    """
    try:
        own, sent = action()
    except Exception as error:
        processes.all_gather_objects([type(error).__name__, errors.text_of(error)])
        raise
    reports = processes.all_gather_objects([sent])
    for rank, report in enumerate(reports):
        if len(report) > 1:
            kind, text = report
            theirs = _class_of(kind)(f"On process {rank}: {text}")
            theirs.origin = rank
            raise theirs
    return own, [report[0] for report in reports]


def run_on_all_or_main(
    processes: Processes,
    name: str,
    by_all: Callable[[], R],
    by_main: Callable[[], R] | None,
    *,
    key: str = "",
) -> R:
    """Run `by_all` where all processes make this call, `by_main` where process 0 makes it alone.

    Nothing collective happens before it is known who calls; a process that calls without process
    0 gets an error. Returns when all processes have called, or have begun a later collective.

    Args:
        processes: The processes of the job.
        name: Of the call, for errors.
        by_all: Called by all, with collectives.
        by_main: Called by process 0 without collectives; its result is that of all that call.
            None: an error, on all that call.
        key: What tells this call from one of the same name right after it.

    Raises:
        DistributedError: Not all make the call that must, or it is not known in time.
    """
    if by_main is not None and processes.is_main and collective_guard.place() in _ON_MAIN:
        with collective_guard.everywhere():
            return by_main()
    collective_guard.check(name)
    if processes.watch is None:  # one process, or no connection to ask over
        return by_all()
    callers, seconds = processes.watch.callers, processes.timeout.total_seconds()
    if processes.is_main:
        return _lead(callers, name, by_all, by_main, callers.missing(name, key, seconds))
    answer = callers.ask(name, key, seconds)
    if answer.failure is not None:
        kind, text = answer.failure
        raise _class_of(kind)(text)
    return cast("R", answer.result) if answer.missing else by_all()


def check_called_by_all(processes: Processes, name: str) -> None:
    """Return when all processes make this call; raise on those that do where some leave it out."""
    run_on_all_or_main(processes, name, lambda: None, None)


def only_this_process(processes: Processes) -> Processes:
    """Return this process as one of a job of its own, whose collectives return at once."""
    return Processes(Membership(World()), processes.device)


def _lead(
    callers: "Callers",
    name: str,
    by_all: Callable[[], R],
    by_main: Callable[[], R] | None,
    missing: tuple[int, ...],
) -> R:
    """Act as process 0, and tell the others that make the call."""
    from trainkit.watchdog.callers import Answer  # one process needs none of it

    if not missing:
        callers.answer(Answer())
        return by_all()
    try:
        if by_main is None:
            raise errors.DistributedError(
                f"`{name}` was called by process 0, but not by {_listed(missing)}, which went on "
                "without it. Every process must call it: take it out of "
                "`if accelerator.is_main_process:` and the like."
            )
        result = by_main()
    except BaseException as error:
        failure = type(error).__name__, f"On process 0: {error}"
        callers.answer(Answer(missing, failure=failure))
        raise
    callers.answer(Answer(missing, result))
    return result


def _listed(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def with_own_group(processes: Processes) -> Processes:
    """Return the same processes with a CPU group of their own, for another thread.

    Every process must call it, and `close` what it returns.
    """
    if processes.control is None:
        return processes
    group = torch.distributed.new_group(backend="gloo")
    torch.distributed.barrier(group)
    processes.apply_timeout(group)
    membership = dataclasses.replace(processes._membership, owned=False, control=group)
    return Processes(membership, processes.device)


def _class_of(kind: str) -> type[errors.TrainkitError]:
    found = getattr(errors, kind, None)
    return found if found is not None else errors.DistributedError
