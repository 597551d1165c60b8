"""Nestings of tensors: apply a function to each, pad them, split them between processes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trainkit.containers import dataclasses
from trainkit.distributed.processes import Processes
from trainkit.errors import DataError

__all__ = ["map_tensors", "only_tensors", "pad_to_longest", "split"]


def map_tensors(
    function: Callable[[Tensor], Any], value: Any, path: str, paths: list[str] | None = None
) -> Any:
    """Return `value` with `function` applied to each tensor in it, in order.

    Args:
        function: Takes a tensor.
        value: A tensor, or any nesting of lists, tuples, dicts, mappings and data classes.
        path: Names `value` in errors.
        paths: Takes up the names of the tensors.

    Raises:
        DataError: There is something else than a tensor.
    """
    if isinstance(value, Tensor):
        if paths is not None:
            paths.append(path)
        return function(value)
    taken = dataclasses.parts(value)
    if taken is not None:
        keys, values = taken
        mapped = [
            map_tensors(function, item, f"{path}[{key!r}]", paths)
            for key, item in zip(keys, values, strict=True)
        ]
        return dataclasses.build(type(value), keys, mapped)
    if isinstance(value, list | tuple):
        items = [
            map_tensors(function, item, f"{path}[{index}]", paths)
            for index, item in enumerate(value)
        ]
        return tuple(items) if isinstance(value, tuple) else items
    raise DataError(
        f"`{path}` is a {type(value).__name__}, but must be a tensor, or a nesting of them. Turn "
        "numbers into tensors with `torch.tensor`."
    )


def only_tensors(value: Any) -> bool:
    """Return whether `value` is a tensor, or a nesting of nothing but tensors."""
    try:
        map_tensors(lambda tensor: tensor, value, "value")
    except DataError:
        return False
    return True


def pad_to_longest(
    processes: Processes, value: Any, dim: int, pad_index: float, pad_first: bool
) -> Any:
    """Return each tensor of a nesting made as long in `dim` as the longest on any process."""
    sizes: list[int] = []

    def measure(tensor: Tensor) -> Tensor:
        sizes.append(tensor.shape[dim] if _has(tensor, dim) else 0)
        return tensor

    failure = ""
    try:
        map_tensors(measure, value, "tensor")
    except DataError as error:
        failure = str(error)  # raised below by all, as the others wait for our sizes
    packets = processes.all_gather_objects((failure, sizes))
    for rank, (message, _) in enumerate(packets):
        if message:
            raise DataError(f"On process {rank}: {message}")
    of_all = [packet[1] for packet in packets]
    if any(len(others) != len(sizes) for others in of_all):
        numbers = ", ".join(str(len(others)) for others in of_all)
        raise DataError(
            f"`tensor` holds {numbers} tensors on the processes. Pass the same structure on all."
        )
    longest = iter([max(column) for column in zip(*of_all, strict=True)])

    def pad(tensor: Tensor) -> Tensor:
        size = next(longest)
        return _padded(tensor, dim, size, pad_index, pad_first) if _has(tensor, dim) else tensor

    return map_tensors(pad, value, "tensor")


def _has(tensor: Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def _padded(tensor: Tensor, dim: int, size: int, pad_index: float, pad_first: bool) -> Tensor:
    length = tensor.shape[dim]
    if length == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, size - length if pad_first else 0, length).copy_(tensor)
    return padded


def split(inputs: Any, index: int, parts: int, apply_padding: bool) -> Any:
    """Return part `index` of `parts` of a list, tuple or tensor, or of each value of a dict.

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
    if not isinstance(inputs, list | tuple | Tensor):
        raise DataError(
            "`inputs` must be a list, tuple or tensor, or a dict of such, but is a "
            f"{type(inputs).__name__}."
        )
    each, extra = divmod(len(inputs), parts)
    start = index * each + min(index, extra)
    mine = inputs[start : start + each + (index < extra)]
    missing = each + (extra > 0) - len(mine)
    if apply_padding and missing and len(inputs):
        return _filled_up(mine, inputs[-1:], missing)
    return mine


def _filled_up(part: Any, last: Any, missing: int) -> Sequence[Any] | Tensor:
    if isinstance(part, Tensor):
        return torch.cat([part, *[last] * missing])
    filled: Sequence[Any] = part + last * missing
    return filled
