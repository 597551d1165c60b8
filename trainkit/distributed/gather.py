"""Gather what the processes computed: every sample once, in the order of one process."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainkit.distributed import classes, codec, guard
from trainkit.distributed.processes import Processes
from trainkit.distributed.rows import (
    Container,
    Memory,
    Merge,
    Node,
    Origin,
    Rows,
    cut,
    from_plain,
    is_array,
    join,
    parse,
    split,
    to_plain,
)
from trainkit.errors import DataError

__all__ = ["concatenate", "gather_samples", "gather_tensors"]


@dataclass(slots=True)
class _Failure:
    """Why a process has no entries to send; the others raise it too."""

    message: str


def gather_samples(
    processes: Processes,
    batches: Sequence[Any],
    counts: Sequence[Sequence[int]],
    local_sizes: Sequence[int],
    *,
    pad_value: float = 0,
    name: str = "value",
    memory: Memory | None = None,
) -> Any:
    """Return the entry of each real sample of consecutive batches once, on every process.

    The order is that of one process: batch by batch, in each the processes in their order. Where
    the entries of a value are, and what a list or tuple means, stands in `rows`. Tensors that
    differ in later dimensions are padded at the end. Tensors from another device come back on
    `processes.device`; between processes they travel through the CPU. One collective, or two if
    the entries are many. What has no form of its own in `codec` travels by pickle.

    Args:
        processes: The processes that computed.
        batches: What this process computed for each batch.
        counts: For each batch the number of real samples on each process; equal on all.
        local_sizes: For each batch the number of entries that its value must have here: the real
            samples, or the size of the repeated batch where there are none (DESIGN 2.16).
        pad_value: What fills up later dimensions.
        name: What errors call the value.
        memory: What lists and tuples meant in earlier calls; brought up to date.

    Raises:
        DataError: On all processes, if on one of them a value has not one entry for each sample,
            cannot travel, or has another structure than elsewhere. Values of processes without
            real samples are not held against them.
    """
    guard.check("gather_for_metrics")
    if not batches:
        return []
    known: dict[str, type] = {}
    mine = [
        _own_entries(batch, size, numbers[processes.rank], name, known)
        for batch, size, numbers in zip(batches, local_sizes, counts, strict=True)
    ]
    entries = _exchange(processes, mine, counts)
    nodes, origins = _in_order(entries, counts)
    if processes.size == 1 and len(batches) == 1 and local_sizes[0] == counts[0][0]:
        return batches[0]  # as it is: not even a container is made anew
    merge = Merge(pad_value, known, {} if memory is None else memory)
    return merge(nodes, origins, name)


def gather_tensors(processes: Processes, value: Any, *, name: str = "value") -> Any:
    """Return a tensor, or a nesting of tensors, of all processes joined along dimension 0.

    A scalar counts as one row. The first dimensions may differ, the later ones may not.

    Raises:
        DataError: On all processes, if on one of them there is anything but tensors, or the
            structures or later dimensions differ.
    """
    guard.check("gather")
    known: dict[str, type] = {}
    try:
        mine: Node | _Failure = _all_rows(value, name, known)
    except DataError as error:
        mine = _Failure(str(error))
    counts = [[1] * processes.size]
    nodes, origins = _in_order(_exchange(processes, [mine], counts), counts)
    return Merge(None, known)(nodes, origins, name)


def concatenate(
    values: Sequence[Any], sizes: Sequence[int] | None = None, *, pad_value: float = 0
) -> Any:
    """Return one value with the entries of several, as `gather_samples` returns them, in order.

    Args:
        values: Values of one structure, at least one, else an empty list comes back.
        sizes: Number of samples in each; taken from the first tensor or list if not given.
        pad_value: What fills up later dimensions.
    """
    if not values:
        return []
    if sizes is None:
        sizes = [_first_size(value) for value in values]
    known: dict[str, type] = {}
    nodes = [parse(value, size, "value", known) for value, size in zip(values, sizes, strict=True)]
    filled = [index for index, size in enumerate(sizes) if size > 0] or range(len(nodes))
    origins = [Origin(0, index) for index in filled]
    return Merge(pad_value, known)([nodes[index] for index in filled], origins, "value")


def _own_entries(
    batch: Any, size: int, count: int, name: str, known: dict[str, type]
) -> Node | _Failure:
    try:
        return cut(parse(batch, size, name, known), count)
    except DataError as error:
        return _Failure(str(error))
    except Exception as error:  # whatever it is: the other processes wait for this packet
        return _Failure(f"`{name}` cannot be gathered: {type(error).__name__}: {error}")


def _all_rows(value: Any, path: str, known: dict[str, type]) -> Node:
    if isinstance(value, Tensor):
        return Rows(value if value.ndim else value.reshape(1))
    taken = classes.parts(value)
    if taken is None and isinstance(value, list | tuple):
        taken = list(range(len(value))), list(value)
    if taken is None:
        raise DataError(
            f"`{path}` is a {type(value).__name__}, but must be a tensor, or a nesting of them. "
            "Use `gather_object` for other objects."
        )
    keys, values = taken
    children = [
        _all_rows(child, f"{path}[{key!r}]", known) for key, child in zip(keys, values, strict=True)
    ]
    class_name = f"{type(value).__module__}:{type(value).__qualname__}"
    known[class_name] = type(value)
    return Container(class_name, keys, children)


def _exchange(
    processes: Processes, mine: Sequence[Node | _Failure], counts: Sequence[Sequence[int]]
) -> list[Sequence[Node | _Failure]]:
    """Return the entries of all processes, for each batch."""
    if processes.size == 1:
        return [mine]
    try:
        packet = codec.encode(_packed(mine), allow_pickle=True)
    except codec.Unencodable as error:
        packet = codec.encode([error.reason] * len(mine))
    return [
        _unpacked(
            codec.decode(packet, device=processes.device, allow_pickle=True),
            [numbers[rank] for numbers in counts],
        )
        for rank, packet in enumerate(processes.all_gather_bytes(packet))
    ]


def _packed(entries: Sequence[Node | _Failure]) -> Any:
    """Return what travels: a tuple of all batches as one, else a list with each or its failure."""
    nodes = [entry for entry in entries if not isinstance(entry, _Failure)]
    joined = None
    if len(nodes) == len(entries) > 1:
        with suppress(Exception):  # such as no memory for it: the other processes wait
            joined = join(nodes)
    if joined is not None:
        return to_plain(joined)
    return [e.message if isinstance(e, _Failure) else to_plain(e) for e in entries]


def _unpacked(packet: Any, sizes: Sequence[int]) -> Sequence[Node | _Failure]:
    if isinstance(packet, tuple):
        return split(from_plain(packet), sizes)
    return [_Failure(one) if isinstance(one, str) else from_plain(one) for one in packet]


def _in_order(
    entries: Sequence[Sequence[Node | _Failure]], counts: Sequence[Sequence[int]]
) -> tuple[list[Node], list[Origin]]:
    """Return the nodes with real samples, batch by batch; all of them if no sample is real.

    Raises:
        DataError: A process with real samples has failed, or none has anything.
    """
    empty = not any(map(sum, counts))
    nodes: list[Node] = []
    origins = []
    failures = []
    for batch, numbers in enumerate(counts):
        for rank, number in enumerate(numbers):
            node = entries[rank][batch]
            if not isinstance(node, _Failure):
                if number or empty:
                    nodes.append(node)
                    origins.append(Origin(rank, batch))
            elif number or empty:
                failures.append(f"On process {rank}: " * (len(numbers) > 1) + node.message)
    if failures and not (empty and nodes):
        raise DataError(failures[0])
    return nodes, origins


def _first_size(value: Any) -> int:
    """Return the number of samples that `value` seems to hold."""
    while not is_array(value):
        taken = classes.parts(value)
        if taken is None:
            inside = isinstance(value, tuple) and value and is_array(value[0])
            if not inside:
                return len(value)
            taken = [], [value[0]]
        value = next((child for child in taken[1] if child is not None), ())
    return int(value.shape[0]) if value.ndim else 1
