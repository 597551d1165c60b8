"""Act so that all processes learn of a failure, instead of waiting for one that has left."""

import dataclasses
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar, cast

import torch
import torch.distributed

from trainkit import errors
from trainkit.basics.device import memory_of
from trainkit.distributed import collective_guard
from trainkit.distributed.group import Membership, cpu_group
from trainkit.distributed.processes import Processes, pack, unpack
from trainkit.distributed.watch import Answer, Callers
from trainkit.distributed.world import World

R = TypeVar("R", str, None)  # what can travel to processes that take no part
T = TypeVar("T")
U = TypeVar("U")

# Places of `collective_guard.only` that the other processes never come to.
_ON_MAIN = ("on_main_process", "on_process")


def run_on_all(processes: Processes, action: Callable[[], T]) -> T:
    """Run `action` on every process, and return its result there; if it raises on one, on all.

    Every process must call it. The others raise the same kind of error, with its text.
    """
    failure = result = None
    try:
        result = action()
    except Exception as error:
        failure = error
    raise_on_all(processes, failure)
    return cast("T", result)


def run_on_main(processes: Processes, action: Callable[[], T]) -> T:
    """Run `action` on process 0, and return its result on all; if it raises, raise on all.

    The result must be able to travel, as in `all_gather_objects`. Process 0 does not wait.
    """
    report: list[Any] = []
    if processes.is_main:
        try:
            report = [action()]
        except Exception as error:
            processes.broadcast_object(_told(error))
            raise
    report = processes.broadcast_object(report)
    if len(report) > 1:
        raise _theirs(report, 0)
    return cast("T", report[0])


def raise_on_all(processes: Processes, failure: Exception | None) -> None:
    """Raise, on all processes, where one has a failure: its own, or that of the first that has.

    One number travels where none has failed.
    """
    first = first_with(processes, failure is not None)
    if first is None:
        return
    report = processes.broadcast_object(None if failure is None else _told(failure), first)
    raise failure or _theirs(report, first)


def first_with(processes: Processes, holds: bool) -> int | None:
    """Return the first process on which something holds, on all; None where it holds on none."""
    rank = processes.rank if holds else processes.size
    first = int(processes.all_reduce(torch.tensor(rank), "min"))
    return None if first == processes.size else first


def ranks_with(processes: Processes, holds: bool) -> list[int]:
    """Return, on all processes, the first ones on which something holds: enough to be named."""
    ranks: list[int] = []
    while len(ranks) < errors.MOST_NAMED:
        first = first_with(processes, holds and processes.rank not in ranks)
        if first is None:
            break
        ranks.append(first)
    return ranks


def are_alike(processes: Processes, number: int, part: int = 0, parts: int = 1) -> bool:
    """Return, on every process, whether all with the same `part` have the same number.

    Every process calls it, and sends 16 bytes a part. The number is below 2**62.
    """
    if processes.size == 1:
        return True
    rows = torch.full((parts, 2), -(2**62))
    rows[part, 0], rows[part, 1] = number, -number
    highest = processes.all_reduce(rows, "max")
    return bool((highest[:, 0] == -highest[:, 1]).all())


def number_of(value: object) -> int:
    """Return a number for `are_alike` that stands for `repr(value)`."""
    digest = blake2b(repr(value).encode("utf-8", "backslashreplace"), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def require_equal(
    processes: Processes, value: T, complaint: Callable[[list[T]], Exception | None]
) -> None:
    """Raise, on all processes, what `complaint` makes of their values where these differ.

    Where they are alike, told by `repr`, one number travels. One process alone looks at none.

    Args:
        value: That of this process, which must be able to travel.
        complaint: Called on process 0, with the values of all; None: they may differ so.
    """
    if processes.size == 1:
        return
    if not are_alike(processes, number_of(value)):
        complain(processes, value, complaint)


def complain(
    processes: Processes, value: T, complaint: Callable[[list[T]], Exception | None]
) -> None:
    """Raise, on all processes, what process 0 makes of the values of all; see `require_equal`."""

    def told(values: list[T]) -> list[str] | None:
        error = complaint(values)
        return None if error is None else _told(error)

    report = gather_on_main(processes, value, told)
    if report is not None:
        kind, text = report
        raise _class_of(kind)(text)


def gather_on_main(processes: Processes, value: U, action: Callable[[list[U]], T]) -> T:
    """Run `action` on process 0 with the values of all, and return its result on all.

    If it raises, all raise. Values and result must be able to travel, as in `all_gather_objects`.
    """
    if processes.size == 1:
        return action([value])
    packet = torch.frombuffer(bytearray(pack(value)), dtype=torch.uint8)
    lengths = torch.zeros(1, dtype=torch.int64) + len(packet)
    row = packet.new_zeros(int(processes.all_reduce(lengths, "max")) + 8)
    row[8:][: len(packet)] = packet
    row[:8] = torch.tensor([len(packet)]).view(torch.uint8)
    rows = [torch.empty_like(row) for _ in range(processes.size * processes.is_main)]
    processes.begun = "gather", row.dtype, row.shape
    torch.distributed.gather(row, rows or None, group=processes.control, group_dst=0)

    def act() -> T:
        packets = [bytes(memory_of(each[8:][: each[:8].view(torch.int64)])) for each in rows]
        return action([unpack(each, rank) for rank, each in enumerate(packets)])

    return run_on_main(processes, act)


def run_and_gather(processes: Processes, action: Callable[[], T]) -> list[T]:
    """Run `action` on every process, and return the results of all; if it raises on one, on all.

    It makes one collective. Results must be able to travel, as in `all_gather_objects`.
    """
    try:
        result = action()
    except Exception as error:
        processes.all_gather_objects(_told(error))
        raise
    reports = processes.all_gather_objects([result])
    for rank, report in enumerate(reports):
        if len(report) > 1:
            raise _theirs(report, rank)
    return [report[0] for report in reports]


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
        raise _class_of(kind)(f"{text} With the same path: it is `{key}` here." if key else text)
    return cast("R", answer.result) if answer.missing else by_all()


def check_called_by_all(processes: Processes, name: str) -> None:
    """Return when all processes make this call; raise on those that do where some leave it out."""
    run_on_all_or_main(processes, name, lambda: None, None)


def only_this_process(processes: Processes) -> Processes:
    """Return this process as one of a job of its own, whose collectives return at once."""
    return Processes(Membership(World()), processes.device)


def _lead(
    callers: Callers,
    name: str,
    by_all: Callable[[], R],
    by_main: Callable[[], R] | None,
    missing: tuple[int, ...],
) -> R:
    """Act as process 0, and tell the others that make the call."""
    if not missing:
        callers.answer(Answer())
        return by_all()
    try:
        if by_main is None:
            raise errors.DistributedError(
                f"`{name}` was called by process 0, but not by {errors.named(missing)}, which "
                "went on without it. Every process must call it: take it out of "
                "`if accelerator.is_main_process:` and the like."
            )
        result = by_main()
    except BaseException as error:
        failure = type(error).__name__, f"On process 0: {error}"
        callers.answer(Answer(missing, failure=failure))
        raise
    callers.answer(Answer(missing, result))
    return result


def with_own_group(processes: Processes) -> Processes:
    """Return the same processes with a CPU group of their own, for another thread.

    Every process must call it, and `close` what it returns.
    """
    if processes.control is None:
        return processes
    group = cpu_group()
    processes.apply_timeout(group)
    membership = dataclasses.replace(processes._membership, owned=False, control=group)
    return Processes(membership, processes.device)


def _told(error: Exception) -> list[str]:
    """Return what travels of an error."""
    return [type(error).__name__, errors.text_of(error)]


def _theirs(report: list[str], rank: int) -> errors.TrainkitError:
    """Return the error that process `rank` has told of."""
    kind, text = report
    error = _class_of(kind)(f"On process {rank}: {text}")
    error.origin = rank
    return error


def _class_of(kind: str) -> type[errors.TrainkitError]:
    cls = getattr(errors, kind, None)
    return cls if cls is not None else errors.DistributedError
