"""Agree on what one process alone may have seen, without waiting for anybody (rule 34)."""

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor

from trainkit.distributed import collective_guard
from trainkit.distributed.processes import Processes
from trainkit.errors import DistributedError

__all__ = ["AsyncFlags"]


class AsyncFlags:
    """A few flags of each process, sent beside the training and read one call later.

    Every process calls `exchange` equally often. All get the same answers: the largest value of
    each flag over all processes. On one process there is nothing to agree on, and the flags come
    back at once.

    They travel in an asynchronous all-reduce of their own, or along with gradients: see `rides`.

    Args:
        processes: The processes that vote; in an all-reduce of its own over their CPU group.
        size: Number of flags: integers from 0 to 64, which survive in any floating-point format.
    """

    def __init__(self, processes: Processes, size: int) -> None:
        self.rides = False
        """Whether flags wait for somebody who sums tensors anyway, and calls `board`."""
        self._processes = processes
        self._size = size
        self._waiting: tuple[int, ...] | None = None
        self._seats: Tensor | None = None
        self._buffer = torch.zeros(size, dtype=torch.int64)
        self._work: torch.distributed.Work | None = None

    def exchange(self, flags: Sequence[int]) -> tuple[int, ...]:
        """Start the vote on `flags`; return the result of the previous one, zeros at first."""
        if len(flags) != self._size:
            raise DistributedError(
                f"This vote is on {self._size} flags, but got {len(flags)}: {tuple(flags)}."
            )
        if self._processes.control is None:
            return tuple(flags)
        agreed = self.drain()
        self._waiting = tuple(flags)
        if not self.rides:
            self._start()
        return agreed

    def board(self, tensor: Tensor) -> Tensor:
        """Return `tensor` with seats for the flags that wait, or as it is where none do.

        The caller averages over all processes, in place, what he gets.

        Args:
            tensor: One-dimensional, of floating-point numbers, equally long on every process.
        """
        if self._waiting is None:
            return tensor
        rank, processes = self._processes.rank, self._processes.size
        joined = tensor.new_zeros(tensor.numel() + processes * self._size)
        joined[: tensor.numel()] = tensor
        self._seats = joined[tensor.numel() :].view(processes, self._size)
        if any(self._waiting):
            self._seats[rank] = torch.tensor(self._waiting, dtype=tensor.dtype)
        self._waiting = None
        return joined

    def drain(self) -> tuple[int, ...]:
        """Return the result of the vote under way, zeros if there is none; blocks for it."""
        collective_guard.check("vote")
        if self._waiting is not None:  # nothing was summed meanwhile
            self._start()
        if self._work is not None:
            self._work.wait()
            self._work = None
            return tuple(self._buffer.tolist())
        if self._seats is not None:
            # Averages of a short format are a little off, but never by half an integer.
            largest, self._seats = self._seats.amax(0).double() * self._processes.size, None
            return tuple(largest.round_().long().tolist())
        return (0,) * self._size

    def _start(self) -> None:
        self._buffer = torch.tensor(self._waiting, dtype=torch.int64)
        self._waiting = None
        self._work = torch.distributed.all_reduce(
            self._buffer, torch.distributed.ReduceOp.MAX, self._processes.control, async_op=True
        )
