"""Agree on what one process alone may have seen, without waiting for anybody (rule 34)."""

from collections.abc import Sequence

import torch

from trainkit.distributed.processes import Pending, Processes
from trainkit.errors import DistributedError

__all__ = ["AsyncFlags"]


class AsyncFlags:
    """A few flags of each process, reduced on the CPU group while the training goes on.

    Every process calls `exchange` and `result` in turns, equally often. All get the same answers:
    the largest value of each flag over all processes.

    Args:
        processes: Those that exchange flags.
        size: Number of flags, which are integers.
    """

    def __init__(self, processes: Processes, size: int) -> None:
        self._processes = processes
        self._size = size
        self._pending: Pending | None = None

    def exchange(self, flags: Sequence[int]) -> None:
        """Start to reduce `flags` over all processes; returns at once."""
        if len(flags) != self._size:
            raise DistributedError(
                f"This exchange is of {self._size} flags, but got {len(flags)}: {tuple(flags)}."
            )
        assert self._pending is None, "`result` was not called"
        buffer = torch.tensor(flags, dtype=torch.int64)
        self._pending = self._processes.all_reduce_async(buffer, "max")

    def result(self) -> tuple[int, ...]:
        """Return the flags of the exchange under way, zeros if there is none; blocks for it."""
        if self._pending is None:
            return (0,) * self._size
        pending, self._pending = self._pending, None
        return tuple(pending.wait().tolist())
