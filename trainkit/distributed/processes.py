"""The processes of a job and the collectives between them."""

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from trainkit.basics.signals import is_failing
from trainkit.basics.torch_internals import group_backends, set_backend_timeout
from trainkit.containers import wire_format
from trainkit.distributed import collective_guard
from trainkit.distributed.group import Membership, join, set_group_timeout
from trainkit.distributed.watch import Watch
from trainkit.distributed.world import World
from trainkit.errors import ConfigError, DistributedError
from trainkit.lazy import ask

Reduction = Literal["sum", "mean", "max", "min", "prod"]

_HEADER = 8  # bytes of a payload's length in front of it
_SMALLEST_CAPACITY = 512
# Above it a payload travels in a second collective of its own size: the first one, whose
# fixed-size buffers every later call fills again, must stay cheap.
_LARGEST_CAPACITY = 1 << 18


class Pending:
    """A reduction under way; `wait` returns the reduced tensor.

    Args:
        target: The tensor that the caller gave; it holds the result after `wait`.
        buffer: What travels: the memory of `target`, or a contiguous copy of it.
        work: The collective; None if there is nothing to wait for.
        divisor: What the sum is divided by.
    """

    def __init__(self, target: Tensor, buffer: Tensor, work: Work | None, divisor: int) -> None:
        self._target = target
        self._buffer = buffer
        self._work = work
        self._divisor = divisor

    def wait(self) -> Tensor:
        """Return the reduced tensor; blocks the host on the CPU, the stream on an accelerator."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._divisor != 1:
                self._buffer.div_(self._divisor)
            if self._buffer.data_ptr() != self._target.data_ptr():
                self._target.detach().copy_(self._buffer)
        return self._target


class Processes:
    """The processes of a job and the collectives between them.

    Every process of the job calls the same collectives in the same order. On one process they
    return at once. Code that only some processes run gets an error (rule 34).
    """

    _live: ClassVar["Processes | None"] = None

    def __init__(self, membership: Membership, device: torch.device) -> None:
        self.world: World = membership.world
        self.rank: int = self.world.rank
        self.size: int = self.world.size
        self.ranks: Sequence[int] = range(self.size)  # in the job, of which these may be a part
        self.is_main: bool = self.world.is_main
        self.owned: bool = membership.owned
        self.device = device
        self._membership = membership
        self._capacity = _SMALLEST_CAPACITY
        self._pid = os.getpid()
        self._closed = False
        self.repeats = False  # inside a repeat of weight 0, whose rows nobody gathers (rule 16)
        self.wants_outputs = True  # of sequences that are cut: whether a whole output is needed
        self.knows_own_rows = False  # whether `own_rows` was asked for, or said to be
        # Name, dtype and shape of what was begun last: the watch tells by it who is in another one.
        self.begun: tuple[str, torch.dtype | None, torch.Size] = "no collective", None, torch.Size()
        self.watch: Watch | None = None  # on the other processes; None where there are none

    @classmethod
    def start(cls, *, device: torch.device | None = None) -> "Processes":
        """Return the processes of this job; joins the group that exists, or makes one.

        Blocks until all processes have called it. A later call returns the same object as long
        as its group lives. A group that we made ends with the process, or with `close`. A child
        that one of several processes has forked gets a copy that knows its place, and no group.

        Args:
            device: The device of this process; its own accelerator by default, else the CPU.
        """
        live = cls._live
        if live is not None and live.is_usable() and device in (None, live.device):
            return live
        is_member = live is not None and not live._closed and live._membership.lives()
        if live is not None and is_member and live.size > 1 and live._pid != os.getpid():
            # A member of this job forked this process, which is none itself.
            return cls(Membership(live.world), live.device if device is None else device)
        if live is not None and live.watch is not None:
            live.watch.close()
        membership, device = join(device)
        live = cls(membership, device)
        cls._live = live
        if live.size > 1:
            # The watch connects over the group, so it comes last, and leaves first in `close`.
            atexit.register(live._close_at_exit)
            live.watch = ask("start_watch")(live)
        return live

    @property
    def control(self) -> ProcessGroup | None:
        """The gloo group of all processes; None on one. Do not keep it: `close` gives it up."""
        group = self._membership.control
        if group is None and self.size > 1:
            raise DistributedError(
                "This process is not in the process group of the job: it has left by `close`, or "
                "it has a copy of what another process made. Make a new `Trainer`, `Accelerator` "
                "or `Processes` on all processes."
            )
        return group

    @property
    def timeout(self) -> timedelta:
        """How long a collective of the CPU group may wait."""
        return self._membership.timeout or torch.distributed.default_pg_timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives raise after `timeout`: of the default group, also one that the user
        made, of the CPU group, and of the groups that trainkit makes from now on.
        """
        self._membership.set_timeout(timeout)

    def apply_timeout(self, *groups: ProcessGroup) -> None:
        """Give groups that trainkit has made the time-out that was set, or that of its others."""
        for group in groups:
            if self._membership.timeout is not None:
                set_group_timeout(group, self._membership.timeout)
            else:  # not all back ends can change it, and none must where nobody has asked
                for backend in group_backends(group):
                    set_backend_timeout(backend, self.timeout)

    def position(self) -> tuple[int, ...] | None:
        """Return how many collectives this process has begun; None once it has left the groups.

        Equal on all processes at the same place of the program. From any thread.
        """
        return self._membership.position()

    def latest(self) -> str:
        """Return the collective that was begun last, such as `all_reduce of float32[8]`.

        Equal on all processes at the same `position`. From any thread.
        """
        name, dtype, shape = self.begun
        return name if dtype is None else f"{name} of {str(dtype).removeprefix('torch.')}{[*shape]}"

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """Reduce `tensor` over all processes, in place, and return it."""
        return self._reduce(tensor, op, "all_reduce").wait()

    def all_reduce_async(self, tensor: Tensor, op: Reduction = "sum") -> Pending:
        """Start to reduce `tensor` in place; it must not be touched before `wait`."""
        return self._reduce(tensor, op, "all_reduce_async")

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of process `source`, of the same shape; return it."""
        collective_guard.check("broadcast")
        self._check_source(source)
        if self.size > 1:
            buffer = tensor.detach().contiguous()
            self.begun = "broadcast", buffer.dtype, buffer.shape
            torch.distributed.broadcast(buffer, group=self._group_of(buffer), group_src=source)
            if buffer.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(buffer)
        return tensor

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all processes, in their order, without a graph.

        Args:
            rows: Equal in dtype and in later dimensions on all processes.
            counts: How many each process has; equal on all.
        """
        collective_guard.check("all_gather")
        longest = max(counts)
        if self.size == 1 or longest == 0:
            return rows.detach()
        missing = rows.new_zeros(longest - len(rows), *rows.shape[1:])
        sent = torch.cat([rows.detach(), missing])
        received = [torch.empty_like(sent) for _ in counts]
        self.begun = "all_gather", sent.dtype, sent.shape
        torch.distributed.all_gather(received, sent, self._group_of(sent))
        return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all processes, in their order.

        One collective of a fixed size over the CPU group as long as all payloads fit into it;
        else a second one that fits the longest. The size follows the payloads.
        """
        collective_guard.check("all_gather_bytes")
        if self.size == 1:
            return [payload]
        capacity = self._capacity
        first = payload if _HEADER + len(payload) <= capacity else b""
        rows = self._gather_rows(len(payload).to_bytes(_HEADER, "little") + first, capacity)
        lengths = [int.from_bytes(row[:_HEADER], "little") for row in rows]
        longest = max(lengths)
        self._capacity = _next_capacity(capacity, _HEADER + longest)
        if _HEADER + longest <= capacity:
            rows = [row[_HEADER:] for row in rows]
        else:
            rows = self._gather_rows(payload, longest)
        return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def all_gather_objects(self, value: Any, *, allow_pickle: bool = False) -> list[Any]:
        """Return the values of all processes, in their order; copies, tensors on the CPU.

        Args:
            value: Built-in types, tensors, arrays, dataclasses (see `wire_format`).
            allow_pickle: Whether what it cannot hold may travel by pickle.

        Raises:
            DistributedError: On all processes, if the value of one cannot travel.
        """
        collective_guard.check("all_gather_objects")
        if self.size == 1:
            return [value]
        packets = self.all_gather_bytes(pack(value, allow_pickle))
        return [unpack(packet, rank, allow_pickle) for rank, packet in enumerate(packets)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the value of process `source` on all; the others' is not looked at."""
        collective_guard.check("broadcast_object")
        self._check_source(source)
        if self.size == 1:
            return value
        is_source = self.rank == source
        payload = pack(value) if is_source else b""
        first = bytearray(len(payload).to_bytes(_HEADER, "little") + payload[:_SMALLEST_CAPACITY])
        first = self._broadcast_bytes(first.ljust(_HEADER + _SMALLEST_CAPACITY, b"."), source)
        length = int.from_bytes(first[:_HEADER], "little")
        packet = first[_HEADER:][:length]
        if length > len(packet):
            rest = bytearray(payload[len(packet) :] or length - len(packet))
            packet += self._broadcast_bytes(rest, source)
        received = unpack(bytes(packet), source)
        return value if is_source else received

    def _broadcast_bytes(self, buffer: bytearray, source: int) -> bytearray:
        """Overwrite a buffer with that of process `source`, of the same length; return it."""
        packet = torch.frombuffer(buffer, dtype=torch.uint8)
        self.begun = "broadcast", packet.dtype, packet.shape
        torch.distributed.broadcast(packet, group=self.control, group_src=source)
        return buffer

    def barrier(self) -> None:
        """Return when all processes have called it; does not wait for work on the device."""
        collective_guard.check("barrier")
        if self.control is not None:
            self.begun = "barrier", None, torch.Size()
            torch.distributed.barrier(self.control)

    def close(self) -> None:
        """Destroy the groups that trainkit made; those of the user stay.

        Returns when their threads have ended, so it waits for collectives under way. A
        `DistributedDataParallel` that is still referred to keeps the default group's threads.
        """
        if self._pid == os.getpid():  # a fork has the groups, but not their threads
            if self.watch is not None:
                self.watch.close()
                self.watch = None  # it would take processes that have left for those that go on
            self._membership.leave()
        self._closed = True
        if Processes._live is self:
            Processes._live = None
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        # After a failure the others may sit in a collective; leaving in order would wait for them.
        if not is_failing():
            if self.watch is not None:
                self.watch.close("ended without an error")  # its exit code is not known here
            self.close()

    def is_usable(self) -> bool:
        """Return whether the group lives, and in this process: a fork has none."""
        return not self._closed and self._pid == os.getpid() and self._membership.lives()

    def _reduce(self, tensor: Tensor, op: Reduction, name: str) -> Pending:
        collective_guard.check(name)
        reduce_op = _OPS.get(op)
        if reduce_op is None:
            raise ConfigError(f"`op` must be one of {', '.join(_OPS)}, but is {op!r}.")
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigError(
                f'`op="mean"` needs a floating-point tensor, but its dtype is {tensor.dtype}. '
                "Convert it first, or use `sum`."
            )
        if self.size == 1:
            return Pending(tensor, tensor, None, 1)
        buffer = tensor.detach().contiguous()
        self.begun = "all_reduce", buffer.dtype, buffer.shape
        work = torch.distributed.all_reduce(
            buffer, reduce_op, self._group_of(buffer), async_op=True
        )
        return Pending(tensor, buffer, work, self.size if op == "mean" else 1)

    def _group_of(self, tensor: Tensor) -> ProcessGroup | None:
        """Return the group that can move `tensor`; None for the default one of torch.

        The default one may have no backend for the CPU, and its threads may outlive `close`: then
        none of them may have a tensor of Python's.
        """
        control = self.control
        return control if tensor.device.type == "cpu" else self._membership.moving

    def _check_source(self, source: int) -> None:
        if not 0 <= source < self.size:
            raise ConfigError(
                f"`source` must be the number of a process, in [0, {self.size}), but is {source}."
            )

    def _gather_rows(self, row: bytes, width: int) -> list[memoryview]:
        """Gather one row of at most `width` bytes from each process; the rest is arbitrary."""
        mine = bytearray(width)
        mine[: len(row)] = row
        everything = bytearray(width * self.size)
        rows = torch.frombuffer(everything, dtype=torch.uint8).view(self.size, width)
        self.begun = "all_gather", rows.dtype, rows.shape
        torch.distributed.all_gather(
            list(rows.unbind(0)), torch.frombuffer(mine, dtype=torch.uint8), self.control
        )
        view = memoryview(everything)
        return [view[rank * width : (rank + 1) * width] for rank in range(self.size)]


_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.SUM,  # and divided afterwards: not every backend and dtype can average
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "prod": ReduceOp.PRODUCT,
}


def _next_capacity(capacity: int, needed: int) -> int:
    """Return the capacity of the next gather; depends on what all processes know alike."""
    if needed > capacity:
        power = 1 << (needed - 1).bit_length()
        return max(capacity, min(power, _LARGEST_CAPACITY))
    if needed <= capacity // 4:
        return max(capacity // 2, _SMALLEST_CAPACITY)
    return capacity


def pack(value: Any, allow_pickle: bool = False) -> bytes:
    """Return the encoded value, or the reason why it cannot travel, for all to raise."""
    try:
        return b"+" + wire_format.encode(value, allow_pickle=allow_pickle)
    except wire_format.Unencodable as error:
        return b"-" + str(error).encode()


def unpack(packet: bytes, rank: int, allow_pickle: bool = False) -> Any:
    """Return what process `rank` has packed."""
    if packet[:1] == b"-":
        raise DistributedError(f"The value of process {rank} cannot travel. {packet[1:].decode()}")
    return wire_format.decode(packet[1:], allow_pickle=allow_pickle)
