"""Gather rows so that gradients flow back to the process that gave them (DESIGN 2.6).

The gradient of a row is the sum of what all processes did with it, as if one process had computed
the losses of all.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from trainkit.distributed import classes, guard, tree
from trainkit.distributed.processes import Processes
from trainkit.errors import DataError

__all__ = ["gather_with_gradients", "own_rows"]


def gather_with_gradients(processes: Processes, value: Any, *, name: str = "value") -> Any:
    """Return a tensor, or a nesting of tensors, of all processes, each with its graph.

    As `gather_tensors`, but the tensors stay on their device. One collective tells the sizes, then
    each tensor takes one here and one in the backward, which every process must run. Gradients
    of gradients are refused.

    Raises:
        DataError: On all processes, if on one of them there is anything but tensors, or their
            names, dtypes, later dimensions, or whether they require a gradient, differ.
    """
    guard.check("gather")
    if processes.size == 1:
        return tree.map_tensors(_as_rows, value, name)
    numbers = iter(_numbers_of_rows(processes, value, name))

    def gathered(tensor: Tensor) -> Tensor:
        rows = _as_rows(tensor)
        counts = next(numbers)
        return _Gather.apply(rows[: counts[processes.rank]], processes, counts)  # type: ignore[no-untyped-call, no-any-return]

    return tree.map_tensors(gathered, value, name)


def own_rows(processes: Processes, tensor: Tensor) -> slice:
    """Return which rows of all that are gathered of `tensor` this process gave."""
    guard.check("own_rows")
    counts = processes.all_gather_objects(0 if processes.repeats else len(_as_rows(tensor)))
    first = sum(counts[: processes.rank])
    return slice(first, first + counts[processes.rank])


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
        # The sum is made in place, and others may hold the gradient. That of a repeat counts for
        # nothing, even where 0 times it is not 0.
        own = torch.zeros_like(gradient) if ctx.repeats else gradient.clone()
        total = ctx.processes.all_reduce(own)
        return total.narrow(0, sum(counts[:rank]), counts[rank]), None, None


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)


def _numbers_of_rows(processes: Processes, value: Any, name: str) -> list[list[int]]:
    """Return for each tensor in `value` how many rows each process gives."""
    mine: list[Any] | str
    try:
        mine = [_facts(path, tensor, processes.repeats) for path, tensor in _named(value, name)]
    except DataError as error:
        mine = str(error)  # raised below by all, as the others wait for our sizes
    packets = processes.all_gather_objects(mine)
    for rank, facts in enumerate(packets):
        if isinstance(facts, str):
            raise DataError(f"On process {rank}: {facts}")
        if [fact[1:] for fact in facts] != [fact[1:] for fact in packets[0]]:
            raise DataError(
                f"`{name}` is {_words(packets[0])} on process 0, but {_words(facts)} on process "
                f"{rank}. All but the first dimension must be equal on all processes, and who "
                "requires a gradient too: their backwards wait for each other."
            )
    return [[fact[0] for fact in of_tensor] for of_tensor in zip(*packets, strict=True)]


def _named(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nesting in the order of `tree.map_tensors`."""
    if isinstance(value, Tensor):
        yield path, value
        return
    keys, values = classes.parts(value) or ([], [])
    if not keys and isinstance(value, list | tuple):
        keys, values = list(range(len(value))), list(value)
    elif not keys:
        tree.map_tensors(_as_rows, value, path)  # raises where it is no container
    for key, child in zip(keys, values, strict=True):
        yield from _named(child, f"{path}[{key!r}]")


def _facts(path: str, tensor: Tensor, repeats: bool) -> tuple[int, str, list[int], str, bool]:
    rows = _as_rows(tensor)
    has_graph = rows.requires_grad and torch.is_grad_enabled()
    count = 0 if repeats else len(rows)
    return count, path, list(rows.shape[1:]), str(rows.dtype), has_graph


def _words(facts: list[tuple[int, str, list[int], str, bool]]) -> str:
    words = [
        f"`{path}` of {count} rows of shape {later}, {dtype}, with{'' if has_graph else 'out'} "
        "a gradient"
        for count, path, later, dtype, has_graph in facts
    ]
    return "; ".join(words) or "without tensors"
