"""Agree on what one process alone may have seen, without waiting for anybody (DESIGN 2.34)."""

from collections.abc import Sequence

import torch
import torch.distributed

from trainkit.distributed import guard
from trainkit.distributed.processes import Processes
from trainkit.errors import DistributedError

__all__ = ["Vote"]


class Vote:
    """An asynchronous all-reduce of a few flags, read one call later.

    Every process calls `exchange` equally often. All get the same answers: the largest value of
    each flag over all processes. On one process there is nothing to agree on, and the flags come
    back at once.

    Args:
        processes: The processes that vote, over their CPU group.
        size: Number of flags.
    """

    def __init__(self, processes: Processes, size: int) -> None:
        self._processes = processes
        self._size = size
        self._buffer = torch.zeros(size, dtype=torch.int64)
        self._work: torch.distributed.Work | None = None

    def exchange(self, flags: Sequence[int]) -> tuple[int, ...]:
        """Start the vote on `flags`; return the result of the previous one, zeros at first."""
        if len(flags) != self._size:
            raise DistributedError(
                f"This vote is on {self._size} flags, but got {len(flags)}: {tuple(flags)}."
            )
        group = self._processes.control
        if group is None:
            return tuple(flags)
        agreed = self.drain()
        self._buffer = torch.tensor(flags, dtype=torch.int64)
        self._work = torch.distributed.all_reduce(
            self._buffer, torch.distributed.ReduceOp.MAX, group, async_op=True
        )
        return agreed

    def drain(self) -> tuple[int, ...]:
        """Return the result of the vote under way, zeros if there is none; blocks for it."""
        guard.check("vote")
        if self._work is None:
            return (0,) * self._size
        self._work.wait()
        self._work = None
        return tuple(self._buffer.tolist())
