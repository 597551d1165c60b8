"""Agree on what one process alone may have seen, without waiting for anybody (rule 34)."""

import time
from collections.abc import Callable, Sequence

import torch

from trainkit.distributed.processes import Pending, Processes
from trainkit.errors import DistributedError

SECONDS = 0.25  # between two exchanges, about
MOST_WINDOWS = 32  # of an interval: windows may become slower at any time


class AsyncFlags:
    """A few flags of each process, reduced on the CPU group while the training goes on.

    Every process calls `result` and `count_window` once a window, and `exchange` where that says
    so, or where all know that the end has come. All get the same answers: the largest value of each
    flag over all processes. With the flags travels how long a window took: that of the slowest
    process says after how many windows the next exchange comes.

    Args:
        clock: Returns seconds.
    """

    def __init__(
        self, processes: Processes, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._processes = processes
        self._size = size
        self._clock = clock
        self._pending: Pending | None = None
        self._interval = 1  # windows from one exchange to the next
        self._windows = 0  # since the last exchange
        self._since = clock()

    def count_window(self) -> bool:
        """Count a window; return whether flags are to be exchanged at its end."""
        self._windows += 1
        return self._windows >= self._interval

    def exchange(self, flags: Sequence[int]) -> None:
        """Start to reduce `flags` over all processes; returns at once."""
        if len(flags) != self._size:
            raise DistributedError(
                f"This exchange is of {self._size} flags, but got {len(flags)}: {tuple(flags)}."
            )
        assert self._pending is None, "`result` was not called"
        now = self._clock()
        seconds = (now - self._since) / max(self._windows, 1)
        self._since, self._windows = now, 0
        buffer = torch.tensor((*flags, int(1e6 * seconds)), dtype=torch.int64)
        self._pending = self._processes.all_reduce_async(buffer, "max")

    def result(self) -> tuple[int, ...] | None:
        """Return the flags of the exchange under way, None if there is none; blocks for it."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        *flags, microseconds = pending.wait().tolist()
        windows = int(1e6 * SECONDS) // max(microseconds, 1)
        self._interval = max(1, min(windows, MOST_WINDOWS))
        return tuple(flags)
