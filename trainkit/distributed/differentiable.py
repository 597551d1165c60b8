"""Gather rows so that gradients flow back to the process that gave them (rule 6)."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from trainkit.containers.tree import map_tensors, named_tensors
from trainkit.distributed import collective_guard
from trainkit.distributed.collectives import run_and_gather
from trainkit.distributed.processes import Processes
from trainkit.errors import DataError


def gather_with_gradients(processes: Processes, value: Any, *, name: str = "value") -> Any:
    """Return a tensor, or a nesting of tensors, of all processes, each with its graph.

    As `gather_tensors`, but the tensors stay on their device. One collective tells the sizes, then
    each tensor takes one here and one in the backward, which every process must run. Gradients
    of gradients are refused.

    Raises:
        DataError: On all processes, if on one of them there is anything but tensors, or their
            names, dtypes, later dimensions, or whether they require a gradient, differ.
    """
    collective_guard.check("gather")
    if processes.size == 1:
        return map_tensors(torch.atleast_1d, value, name)
    counted = _numbers_of_rows(processes, value, name)
    numbers = iter(counted)

    def gathered(tensor: Tensor) -> Tensor:
        counts = next(numbers)
        rows = torch.atleast_1d(tensor)[: counts[processes.rank]]  # type: ignore[no-untyped-call]
        return _Gather.apply(rows, processes, counts)  # type: ignore[no-untyped-call, no-any-return]

    return map_tensors(gathered, value, name)


class _Gather(torch.autograd.Function):
    """The rows of all processes; backward adds up what they all say of the rows of this one."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, processes: Processes, counts: list[int]) -> Tensor:
        ctx.processes, ctx.counts, ctx.repeats = processes, counts, processes.repeats
        return processes.all_gather(rows, counts)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        counts, rank = ctx.counts, ctx.processes.rank
        _say_if_uneven(ctx.processes, counts)  # whoever asks for `own_rows` has done so by now
        # What a repeat says counts for nothing, even where it is not finite.
        own = torch.zeros_like(gradient) if ctx.repeats else gradient.clone()
        total = ctx.processes.all_reduce(own)
        return total.narrow(0, sum(counts[:rank]), counts[rank]), None, None


def _say_if_uneven(processes: Processes, counts: list[int]) -> None:
    """Warn once, on process 0, where labels by `rank * len(rows)` would be those of other rows."""
    if processes.knows_own_rows or len(set(counts)) == 1:
        return
    processes.knows_own_rows = True
    if processes.is_main:
        warnings.warn(
            f"`gather` joins {', '.join(map(str, counts))} rows of the processes. Labels that "
            "count from `rank * len(rows)` would belong to other rows: take `own_rows(x).start`, "
            "and only these rows of `x`. A loss that needs no such labels is right as it is.",
            stacklevel=2,
        )


def _numbers_of_rows(processes: Processes, value: Any, name: str) -> list[list[int]]:
    """Return for each tensor in `value` how many rows each process gives."""

    def described() -> tuple[str, list[int]]:
        tensors = named_tensors(value, name)
        counts = [0 if processes.repeats else t.shape[:1].numel() for _, t in tensors]
        records = torch.is_grad_enabled()
        words = [
            f"`{path}` of rows of shape {list(t.shape[1:])}, {t.dtype}, "
            f"{'with' if t.requires_grad and records else 'without'} a gradient"
            for path, t in tensors
        ]
        return "; ".join(words), counts

    packets = run_and_gather(processes, described)
    for rank, (words, _) in enumerate(packets):
        if words != packets[0][0]:
            raise DataError(
                f"The processes gather different things: process 0 {packets[0][0]}, but process "
                f"{rank} {words}. All but the number of rows must be equal, and who requires a "
                "gradient too: their backwards wait for each other."
            )
    return [list(of_tensor) for of_tensor in zip(*(packet[1] for packet in packets), strict=True)]
