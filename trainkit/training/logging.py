"""The values of a run since its last log: kept on the device, reduced in one collective."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from trainkit.basics.device import wide_dtype
from trainkit.distributed import Processes
from trainkit.distributed.collectives import are_alike, gather_on_main, number_of
from trainkit.distributed.communicator import Communicator
from trainkit.errors import ConfigError, DataError
from trainkit.types import Scalars

Reduction: TypeAlias = Literal["mean", "sum", "max", "last"]
"""How the values of a name are put together, over steps and over processes."""

_REDUCTIONS = ("mean", "sum", "max", "last")
BY_PROCESS = "mean by process"
"""What a state calls a mean in which each process has a weight of 1."""
_Packet: TypeAlias = dict[str, tuple[Reduction, float, float]]


@dataclass(slots=True)
class _Entry:
    """What was logged under one name: a number and its weight so far, in fp64 on their device.

    The number of a mean is the sum of values times weights.
    """

    reduce: Reduction
    number: Tensor | float = 0.0
    weight: Tensor | float = 0.0  # 0 before the first; 1 where it is no mean
    by_process: bool = False  # whether each process gives a weight of 1, and not its samples

    def fold(self, number: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Put another number and its weight to those so far."""
        if self.reduce == "max" and self.weight:
            self.number = _maximum(self.number, number)
        elif self.reduce in ("mean", "sum"):
            self.number = self.number + number
        else:
            self.number = number
        self.weight = self.weight + weight if self.reduce == "mean" else 1.0

    def result(self) -> float:
        """Return what was logged; a mean over nothing is NaN."""
        if self.reduce == "mean":
            return float(self.number / self.weight) if self.weight else math.nan
        return float(self.number)


class LogSums:
    """Weighted means, sums, maxima and last values by name (rule 35).

    Nothing is read from the device before `reduce`. Sums are kept in fp64.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(
        self,
        name: str,
        value: Tensor | float,
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
    ) -> None:
        """Take in one value; tensors must hold one element and stay on their device.

        Without a weight it is one of each process.
        """
        entry = self._entries.get(name)
        if entry is None:
            if reduce not in _REDUCTIONS:
                raise ConfigError(
                    f"`reduce` of `{name}` must be one of {_REDUCTIONS}, but is {reduce!r}."
                )
            entry = self._entries[name] = _Entry(reduce, by_process=weight is None)
        elif entry.reduce != reduce:
            raise ConfigError(
                f"`{name}` was logged with reduce={entry.reduce!r} before, and now with "
                f"reduce={reduce!r}. Use one of them, or two names."
            )
        if isinstance(value, Tensor) and (value.ndim or value.requires_grad):
            value = _scalar(name, value)
        if reduce != "mean":
            entry.fold(_wide(value, copy=True) if isinstance(value, Tensor) else value)
        elif isinstance(weight, Tensor):
            weight = _wide(weight.detach()).reshape(())
            number = value if isinstance(value, Tensor) else torch.full_like(weight, value)
            # A mean over no items is NaN and must not count.
            entry.fold(torch.where(weight > 0, number, 0.0) * weight, weight)
        elif weight != 0:
            weight = 1 if weight is None else weight
            if isinstance(value, Tensor):
                if not isinstance(entry.number, Tensor):
                    wide = wide_dtype(value.device.type)
                    entry.number = torch.full((), entry.number, dtype=wide, device=value.device)
                if entry.number.device != value.device:
                    value = value.to(entry.number.device)
                entry.number.add_(value, alpha=weight)  # a product and a sum, rounded once
                entry.weight = entry.weight + weight
            else:
                entry.fold(value * weight, weight)

    def join(self, other: "LogSums") -> None:
        """Take over the values of `other`, which must have other names."""
        for name in self._entries.keys() & other._entries.keys():
            raise DataError(
                f"Two metrics of an evaluation are called `{name}`: `evaluation_step` returned it, "
                "and gave it to `run.log` too. Do one of them, or rename it."
            )
        self._entries |= other._entries

    def reduce(self, processes: Processes) -> Scalars:
        """Return the values over all processes, sorted by name, and start afresh.

        Every process must call it. It reads the device once. What travels is as much for any
        number of processes, where all have logged the same names.
        """
        packet, self._entries = self._packet(), {}
        kinds = sorted((name, kind) for name, (kind, _, _) in packet.items())
        if processes.size > 1 and are_alike(processes, number_of(kinds)):
            values = _reduced(processes, packet)
        else:
            values = gather_on_main(processes, packet, _combined)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the open sums of this process; reads the device once."""
        by_process = {name for name, entry in self._entries.items() if entry.by_process}
        return {
            name: (BY_PROCESS if reduce == "mean" and name in by_process else reduce, value, weight)
            for name, (reduce, value, weight) in self._packet().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._entries = {name: _read_entry(*told) for name, told in state.items()}

    def merge(self, state: Mapping[str, Any], share: float) -> None:
        """Add the open sums of another process, in place of which this one goes on.

        Args:
            share: How many processes there are now for each that there was.
        """
        for name, told in state.items():
            other = _read_entry(*told)
            if other.by_process:
                other.number, other.weight = other.number * share, other.weight * share
            entry = self._entries.setdefault(name, other)
            if entry is not other:
                entry.fold(other.number, other.weight)

    def _packet(self) -> _Packet:
        entries = self._entries
        tensors: dict[torch.device, list[Tensor]] = {}
        for entry in entries.values():
            for number in (entry.number, entry.weight):
                if isinstance(number, Tensor):
                    tensors.setdefault(number.device, []).append(_wide(number))
        numbers = {device: iter(torch.stack(of).tolist()) for device, of in tensors.items()}

        def host(number: Tensor | float) -> float:
            return next(numbers[number.device]) if isinstance(number, Tensor) else float(number)

        return {
            name: (entry.reduce, host(entry.number), host(entry.weight))
            for name, entry in entries.items()
        }


@dataclass(kw_only=True, slots=True)
class Log:
    """Collects what is logged: for the next log of a training, or for an evaluation under way."""

    sums: LogSums = field(default_factory=LogSums)
    zero_weight: bool = False  # inside a repeat that only keeps the processes in step
    samples: int | None = None  # of the micro-batch under way: the weight where none is given
    is_read: bool = False  # whether any callback of any process takes what is logged
    last_step: int = 0  # the step that was logged last

    def add(
        self, values: Mapping[str, Tensor | float], weight: Tensor | float | None, reduce: Reduction
    ) -> None:
        """Take in values; see `RunServices.log`."""
        if not self.zero_weight:
            for name, value in values.items():
                self.sums.add(name, value, self.samples if weight is None else weight, reduce)

    @contextmanager
    def apart(self) -> Iterator[LogSums]:
        """Collect what is logged inside apart from what was logged before."""
        outer = self.sums, self.zero_weight, self.samples
        self.sums, self.zero_weight, self.samples = LogSums(), False, None
        try:
            yield self.sums
        finally:
            self.sums, self.zero_weight, self.samples = outer


@dataclass(kw_only=True, slots=True)
class RunServices:
    """What a step may use of `run`, in a training and in an evaluation before any."""

    processes: Communicator
    """For users, with Accelerate's names; within trainkit `strategy.processes` is asked."""
    logging: Log = field(default_factory=Log)

    @property
    def zero_weight(self) -> bool:
        """Whether this is a repeat that only keeps the processes in step and counts for nothing."""
        return self.logging.zero_weight

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self.processes.is_main_process

    def log(
        self,
        values: Mapping[str, Tensor | float],
        weight: Tensor | float | None = None,
        reduce: Reduction = "mean",
    ) -> None:
        """Add values to the next log, or to the evaluation under way: between its batches.

        Args:
            values: Numbers or one-element tensors by name. Tensors are not read before the log.
            weight: How much they count in a mean. None: the number of samples in the micro-batch
                under way, in training as in an evaluation, and 1 between micro-batches.
            reduce: How they are put together over the steps since the last log, or the batches of
                the evaluation, and over all processes: "mean" (weighted), "sum", "max" or "last".
        """
        self.logging.add(values, weight, reduce)

    def gather_for_metrics(self, input_data: Any, **options: Any) -> Any:
        """Return every real sample's entry of all processes; see `Communicator`."""
        return self.processes.gather_for_metrics(input_data, **options)

    def gather(self, tensor: Any, differentiable: bool = False) -> Any:
        """Return the tensors of all processes, joined along dimension 0; see `Communicator`."""
        return self.processes.gather(tensor, differentiable)

    def own_rows(self, tensor: Tensor) -> slice:
        """Return which rows of `gather(tensor)` this process gave; see `Communicator`."""
        return self.processes.own_rows(tensor)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process."""
        self.processes.print(*args, **kwargs)


class NoRun(RunServices):
    """Takes the place of a run in an evaluation before any `fit`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"`run.{name}` belongs to a `fit`, and this trainer has made none: in an evaluation "
            "before it, `run` has only `log`, `processes`, 'gather', 'gather_for_metrics', "
            "'is_main_process', 'own_rows', 'print'."
        )


def _read_entry(entry: Any, value: float, weight: float) -> _Entry:
    by_process = entry == BY_PROCESS
    return _Entry("mean" if by_process else entry, value, weight, by_process)


def _scalar(name: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ConfigError(
            f"`{name}` must be a single number to be logged, but has the shape "
            f"{tuple(value.shape)}. Log its mean, with the number of items as `weight`."
        )
    return value.detach().reshape(())


def _wide(value: Tensor, copy: bool = False) -> Tensor:
    return value.to(wide_dtype(value.device.type), copy=copy)


def _maximum(first: Tensor | float, second: Tensor | float) -> Tensor | float:
    """Return the larger; NaN where either is, because it must be seen."""
    tensors = [each for each in (first, second) if isinstance(each, Tensor)]
    if not tensors:
        return first if first != first or first > second else second
    return torch.maximum(*(torch.as_tensor(each).to(tensors[0]) for each in (first, second)))


def _reduced(processes: Processes, packet: _Packet) -> Scalars:
    """Return the values of names that all processes hold, in their order."""
    entries = dict(sorted(packet.items()))
    # The last value is that of process 0, as `_combined` takes it.
    mine = {"mean": True, "sum": True, "last": processes.is_main, "max": False}
    summands = [(v, w) if mine[kind] else (0.0, 0.0) for kind, v, w in entries.values()]
    sums = processes.all_reduce(torch.tensor(summands, dtype=torch.float64)).tolist()
    reduced = {
        name: (packet[name][0], value, weight)
        for name, (value, weight) in zip(entries, sums, strict=True)
    }
    largest = {name: value for name, (kind, value, _) in entries.items() if kind == "max"}
    if largest:
        numbers = torch.tensor([*largest.values()], dtype=torch.float64)
        absent = numbers.isnan()  # which a backend may take for the smaller
        numbers = processes.all_reduce(
            torch.stack([numbers.masked_fill(absent, -torch.inf), absent.double()]), "max"
        )
        values = numbers[0].masked_fill(numbers[1] > 0, torch.nan).tolist()
        reduced |= {name: ("max", value, 1.0) for name, value in zip(largest, values, strict=True)}
    return _combined([reduced])


def _combined(packets: list[_Packet]) -> Scalars:
    """Put together what the processes hold, by names in order; of last values the first counts."""
    entries: dict[str, _Entry] = {}
    for name, (kind, number, weight) in chain.from_iterable(packet.items() for packet in packets):
        entry = entries.setdefault(name, _Entry(kind))
        if entry.reduce != kind:
            first, second = sorted([entry.reduce, kind])
            raise ConfigError(
                f"`{name}` was logged with reduce={first!r} on one process and {second!r} on "
                "another. Use the same on all."
            )
        if kind != "last" or not entry.weight:
            entry.fold(number, weight)
    return {name: entries[name].result() for name in sorted(entries)}
