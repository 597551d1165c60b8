"""Make tensors equally long on all processes, and share inputs out between them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.containers.tree import map_tensors, named_tensors
from trainkit.distributed.collectives import require_equal, run_on_all
from trainkit.distributed.processes import Processes
from trainkit.errors import DataError, by_process

__all__ = ["pad_to_longest", "split"]


def pad_to_longest(
    processes: Processes, value: Any, dim: int, pad_index: float, pad_first: bool
) -> Any:
    """Return each tensor of a nesting made as long in `dim` as the longest on any process."""

    def measured() -> list[int]:
        tensors = named_tensors(value, "tensor")
        return [tensor.shape[dim] if _has(tensor, dim) else 0 for _, tensor in tensors]

    sizes = run_on_all(processes, measured)
    require_equal(processes, len(sizes), _different_numbers)
    longest = iter(processes.all_reduce(torch.tensor(sizes), "max").tolist())

    def pad(tensor: Tensor) -> Tensor:
        size = next(longest)
        return _padded(tensor, dim, size, pad_index, pad_first) if _has(tensor, dim) else tensor

    return map_tensors(pad, value, "tensor")


def _different_numbers(numbers: Sequence[int]) -> DataError:
    return DataError(
        f"`tensor` does not hold as many tensors everywhere: {by_process(numbers)}. Pass the same "
        "structure on all processes."
    )


def _has(tensor: Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def _padded(tensor: Tensor, dim: int, size: int, pad_index: float, pad_first: bool) -> Tensor:
    missing = size - tensor.shape[dim]
    later = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim)  # `pad` begins with the last dimension
    ends = [missing, 0] if pad_first else [0, missing]
    return torch.nn.functional.pad(tensor, [*later, *ends], value=pad_index) if missing else tensor


def split(inputs: Any, index: int, parts: int, apply_padding: bool) -> Any:
    """Return part `index` of `parts` of a list, tuple, tensor or `datasets.Dataset`.

    Of a dict, that of each value.

    Args:
        inputs: What is split into consecutive slices whose lengths differ by at most one.
        index: Which part.
        parts: How many there are.
        apply_padding: Whether shorter parts are filled up with the last entry of `inputs`.
    """
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"The values of `inputs` must be equally long, but their lengths are {lengths}."
            )
        return {key: split(value, index, parts, apply_padding) for key, value in inputs.items()}
    select = getattr(inputs, "select", None)  # that of a `datasets.Dataset`
    is_plain = isinstance(inputs, list | tuple | Tensor)
    if not is_plain and not (callable(select) and hasattr(inputs, "__len__")):
        raise DataError(
            "`inputs` must be a list, tuple, tensor or `datasets.Dataset`, or a dict of such, but "
            f"is a {type(inputs).__name__}. Write `list(inputs)`."
        )
    each, extra = divmod(len(inputs), parts)
    start = index * each + min(index, extra)
    stop = start + each + (index < extra)
    missing = each + (extra > 0) - (stop - start)
    if not apply_padding or not len(inputs):
        missing = 0
    if not is_plain:
        assert callable(select)
        return select([*range(start, stop), *[len(inputs) - 1] * missing])
    mine = inputs[start:stop]
    return _filled_up(mine, inputs[-1:], missing) if missing else mine


def _filled_up(part: Any, last: Any, missing: int) -> Sequence[Any] | Tensor:
    if isinstance(part, Tensor):
        return torch.cat([part, *[last] * missing])
    filled: Sequence[Any] = part + last * missing
    return filled
