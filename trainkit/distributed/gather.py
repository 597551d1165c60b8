"""Gather what the processes computed: every sample once, in the order of one process."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.containers import wire_format
from trainkit.containers.sample_rows import (
    Container,
    Merge,
    Node,
    Origin,
    Rows,
    Samples,
    as_samples,
    cut,
    join,
    parse,
    split,
)
from trainkit.containers.tree import is_named, parts
from trainkit.distributed import collective_guard
from trainkit.distributed.active_batches import BatchInfo
from trainkit.distributed.processes import Processes
from trainkit.errors import DataError, text_of

ROWS_VARY = (
    " Where its collate function leaves samples out or adds some, let every tensor of the batch "
    "have a row for each that is left."
)
"""Follows what is said of a value that does not fit a batch of a collate function of the user's."""


@dataclass(slots=True)
class Refusal:
    """Why a process has no entries to send, in place of a batch; the others raise it too."""

    message: str


def gather_samples(
    processes: Processes,
    batches: Sequence[Any],
    counts: Sequence[Sequence[int]],
    local_sizes: Sequence[int],
    *,
    pad_value: float | None = None,
    name: str = "value",
    use_gather_object: bool = False,
    hint: str = "",
) -> Any:
    """Return the entry of each real sample of consecutive batches once, on every process.

    The order is that of one process: batch by batch, in each the processes in their order. Where
    the entries of a value are, and what a list or tuple means, stands in `sample_rows`. Tensors
    that differ in later dimensions are filled up at the end. Tensors from another device come back
    on `processes.device`; between processes they travel through the CPU. One collective, or two if
    the entries are many. What has no form of its own in `wire_format` is an error, but with
    `use_gather_object`, which sends it by pickle, and takes it.

    Args:
        batches: What this process computed for each batch, or a `Refusal`.
        counts: For each batch the number of real samples on each process; equal on all.
        local_sizes: For each batch the number of entries that its value must have here: the real
            samples, or the size of the repeated batch where there are none (rule 16).
        pad_value: What fills up later dimensions; see `sample_rows.Merge`.
        name: What errors call the value.
        use_gather_object: Each batch is a list of one object per sample, whatever it holds; of
            other processes pickles are accepted (rule 28).
        hint: Follows what is said of a value that has not one entry for each sample.

    Raises:
        DataError: On all processes, if on one of them a value has not one entry for each sample,
            cannot travel, or has another structure than elsewhere. Values of processes without
            real samples are not held against them.
    """
    collective_guard.check("gather_for_metrics")
    if not batches:
        return []
    known: dict[str, type] = {}
    read = as_samples if use_gather_object else partial(parse, known=known)
    mine = [
        _own_entries(read, batch, size, own[processes.rank], name)
        for batch, size, own in zip(batches, local_sizes, counts, strict=True)
    ]
    if hint:
        mine = [Refusal(e.message + hint) if isinstance(e, Refusal) else e for e in mine]
    entries = _exchange(processes, mine, counts, allow_pickle=use_gather_object)
    nodes, origins = _in_order(entries, counts)
    whole = processes.size == 1 and len(batches) == 1 and local_sizes[0] == counts[0][0]
    if whole and entries[0][0] is mine[0]:
        return batches[0]  # as it is: not even a container is made anew
    return Merge(known, pad_value=pad_value)(nodes, origins, name)


def agreed_counts(processes: Processes, batches: Sequence[BatchInfo]) -> list[tuple[int, ...]]:
    """Return the rows that each process has for its real samples, of consecutive batches.

    Where a collate function may make others than were asked for, the processes tell each other, in
    one collective.
    """
    own = [batch.own for batch in batches if batch.own is not None]
    if not own:
        return [batch.counts for batch in batches]
    everywhere = processes.all_gather(torch.tensor([own]), (1,) * processes.size)
    return [tuple(counts) for counts in everywhere.T.tolist()]


def gather_all(
    processes: Processes, value: Any, *, pad_value: float | None = None, name: str = "value"
) -> Any:
    """Return all entries of a value, however many, of all processes, on every process.

    Args:
        value: As for `gather_samples`; a tensor without dimensions counts as one row.
        pad_value: What fills up later dimensions; see `sample_rows.Merge`.

    Raises:
        DataError: On all processes, if on one of them something has no entries, or the structures
            differ.
    """
    collective_guard.check("gather")
    known: dict[str, type] = {}
    mine = _own_entries(partial(parse, known=known), value, None, None, name)
    return _merged(processes, mine, Merge(known, pad_value=pad_value), name)


def gather_tensors(processes: Processes, value: Any, *, name: str = "value") -> Any:
    """Return a tensor, or a nesting of tensors, of all processes joined along dimension 0.

    A scalar counts as one row. The first dimensions may differ, the later ones may not. There is
    no graph behind the result. A process inside a repeat gives no rows.

    Raises:
        DataError: On all processes, if on one of them there is anything but tensors, or the
            structures or later dimensions differ.
    """
    collective_guard.check("gather")
    known: dict[str, type] = {}
    try:
        mine: Node | Refusal = _all_rows(value, name, known, processes.repeats)
    except DataError as error:
        mine = Refusal(str(error))
    return _merged(processes, mine, Merge(known, pads=False), name)


def _merged(processes: Processes, mine: Node | Refusal, merge: Merge, name: str) -> Any:
    """Return all entries of all processes, of which this one has `mine`."""
    counts = [[1] * processes.size]  # none is left out, however many there are
    nodes, origins = _in_order(_exchange(processes, [mine], counts), counts)
    return merge(nodes, origins, name)


def concatenate(values: Sequence[Any], sizes: Sequence[int] | None = None) -> Any:
    """Return one value with the entries of several, as `gather_samples` returns them, in order.

    Args:
        values: Values of one structure; of none an empty list comes back.
        sizes: Number of samples that each must have; None: as many as it has.
    """
    if not values:
        return []
    known: dict[str, type] = {}
    wanted = [None] * len(values) if sizes is None else sizes
    nodes = [parse(value, size, "value", known) for value, size in zip(values, wanted, strict=True)]
    filled = [index for index, size in enumerate(wanted) if size != 0] or range(len(nodes))
    origins = [Origin(0, index) for index in filled]
    return Merge(known)([nodes[index] for index in filled], origins, "value")


def _own_entries(
    read: Callable[[Any, int | None, str], Node],
    value: Any,
    size: int | None,
    count: int | None,
    name: str,
) -> Node | Refusal:
    """Return the first `count` entries of a value, which must have `size`; all where None."""
    if isinstance(value, Refusal):
        return value
    try:
        node = read(value, size, name)
        return node if count is None else cut(node, count)
    except DataError as error:
        return Refusal(str(error))
    except Exception as error:  # whatever it is: the other processes wait for this packet
        return Refusal(f"`{name}` cannot be gathered: {type(error).__name__}: {text_of(error)}")


def _all_rows(value: Any, path: str, known: dict[str, type], repeats: bool) -> Node:
    if isinstance(value, Tensor):
        rows = value if value.ndim else value.reshape(1)
        return Rows(rows[:0] if repeats else rows)
    if not is_named(type(value)) and not isinstance(value, list | tuple):
        raise DataError(
            f"`{path}` is a {type(value).__name__}, but must be a tensor, or a nesting of them. "
            "Use `gather_object` for other objects."
        )
    keys, values = parts(value)
    children = [
        _all_rows(child, f"{path}[{key!r}]", known, repeats)
        for key, child in zip(keys, values, strict=True)
    ]
    class_name = f"{type(value).__module__}:{type(value).__qualname__}"
    known[class_name] = type(value)
    return Container(class_name, keys, children)


def _exchange(
    processes: Processes,
    mine: Sequence[Node | Refusal],
    counts: Sequence[Sequence[int]],
    *,
    allow_pickle: bool = False,
) -> list[Sequence[Node | Refusal]]:
    """Return the entries of all processes, for each batch."""
    if processes.size == 1:
        return [[_without_graph(entry) for entry in mine] if torch.is_grad_enabled() else mine]
    try:
        packet = wire_format.encode(_as_one(mine), allow_pickle=allow_pickle)
    except wire_format.Unencodable as error:
        packet = wire_format.encode([Refusal(error.reason)] * len(mine))
    except Exception as error:  # whatever it is: the other processes wait for this packet
        packet = wire_format.encode([Refusal(f"A value cannot be sent: {error!r}")] * len(mine))
    entries: list[Sequence[Node | Refusal]] = []
    for rank, theirs in enumerate(processes.all_gather_bytes(packet)):
        sent = wire_format.decode(theirs, device=processes.device, allow_pickle=allow_pickle)
        sizes = [numbers[rank] for numbers in counts]
        entries.append(sent if isinstance(sent, list) else split(sent, sizes))
    return entries


def _without_graph(node: Node | Refusal) -> Node | Refusal:
    """Return a node whose tensors carry no gradient, as those of other processes do not."""
    if isinstance(node, Rows):
        return Rows(node.values.detach()) if _has_graph(node.values) else node
    if isinstance(node, Samples) and any(map(_has_graph, node.items)):
        items = [item.detach() if _has_graph(item) else item for item in node.items]
        return Samples(items, node.is_tuple)
    if isinstance(node, Container):
        children: list[Any] = [_without_graph(child) for child in node.children]
        if any(new is not old for new, old in zip(children, node.children, strict=True)):
            return Container(node.class_name, node.keys, children)
    return node


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _as_one(entries: Sequence[Node | Refusal]) -> Node | list[Node | Refusal]:
    """Return what travels: all batches as one, else a list with each."""
    nodes = [entry for entry in entries if not isinstance(entry, Refusal)]
    joined = None
    if len(nodes) == len(entries) > 1:
        with suppress(Exception):  # such as no memory for it: the other processes wait
            joined = join(nodes)
    return list(entries) if joined is None else joined


def _in_order(
    entries: Sequence[Sequence[Node | Refusal]], counts: Sequence[Sequence[int]]
) -> tuple[list[Node], list[Origin]]:
    """Return the nodes with real samples, batch by batch; all of them if no sample is real."""
    empty = not any(map(sum, counts))
    nodes: list[Node] = []
    origins = []
    failures = []
    for batch, numbers in enumerate(counts):
        for rank, number in enumerate(numbers):
            node = entries[rank][batch]
            if not isinstance(node, Refusal):
                if number or empty:
                    nodes.append(node)
                    origins.append(Origin(rank, batch))
            elif number or empty:
                failures.append(f"On process {rank}: " * (len(numbers) > 1) + node.message)
    if failures and not (empty and nodes):
        raise DataError(failures[0])
    return nodes, origins
