"""Cut micro-batches into smaller ones: the samples of a step, and their order, stay the same."""

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from trainkit.containers.sample_rows import holds_fields
from trainkit.containers.tree import children, count_samples, is_container, is_opaque, map_children
from trainkit.data.loader import PreparedLoader
from trainkit.data.window import MicroBatch, Window
from trainkit.errors import ConfigError


def piece_size(samples: int, size: int) -> int:
    """Return the size of the pieces of a batch: equal ones, as few as `size` allows."""
    return -(-samples // -(-samples // size))


def split_windows(
    windows: Generator[Window, None, None], loader: PreparedLoader, size: int
) -> Generator[Window, None, None]:
    """Yield windows whose micro-batches hold at most `size` samples of a process.

    Every process cuts a micro-batch into equally many pieces. One that has no samples for a piece
    gets a zero-weight repeat (rule 16).

    Args:
        loader: Told which piece is under way.
    """
    times = 1 if loader.batch_size is None else -(-loader.batch_size // size)
    with closing(windows):
        for window in windows:
            length = None if window.size is None else window.size * times  # at most
            yield Window(_pieces(window, loader, size), window.total, length)


def slice_samples(batch: Any, start: int, stop: int, count: int) -> Any:
    """Return some samples of a batch, with new containers; tensors share their memory.

    Args:
        batch: Its tensors and arrays have a row for each sample, its lists of other things an
            entry; what has no dimension belongs to all samples.

    Raises:
        ConfigError: Something in the batch has not one row for each sample, or a list in it can
            be read as one of fields and as one of samples. The batch itself is one of fields then.
    """
    return _sliced(batch, slice(start, stop), count, outermost=True)


def _sliced(batch: Any, rows: slice, count: int, *, outermost: bool) -> Any:
    shape = getattr(batch, "shape", None)
    if shape is not None and len(shape) == 0:
        return batch
    if _is_list_of(batch, count):
        if not _may_be_fields(batch, count, outermost):
            return batch[rows]
        if not outermost:
            raise ConfigError(
                f"A batch of {count} samples cannot be cut: the {count} entries of a list in it "
                f"may be {count} samples, or {count} fields with a row for each sample. Yield "
                "fields as a mapping, or choose the batch size by hand."
            )
    elif shape is not None and shape[0] == count:
        return batch[rows]
    if shape is not None or is_opaque(batch):
        what = f"a `{type(batch).__name__}`"
        what += "" if shape is None else f" of shape {tuple(shape)}"
        raise ConfigError(
            f"A batch of {count} samples cannot be cut, because it holds {what}. Yield batches "
            "whose tensors have a row for each sample, or choose the batch size by hand."
        )
    if not is_container(batch):
        return batch
    return map_children(batch, lambda child: _sliced(child, rows, count, outermost=False))


def _pieces(window: Window, loader: PreparedLoader, size: int) -> Iterator[MicroBatch]:
    for micro_batch in window:
        largest = max(micro_batch.counts)
        if largest <= size:
            yield micro_batch
        else:
            yield from _cut(micro_batch, loader, piece_size(largest, size), largest)


def _cut(
    micro_batch: MicroBatch, loader: PreparedLoader, step: int, largest: int
) -> Iterator[MicroBatch]:
    data, rows = micro_batch.data, micro_batch.count
    whole = rows or count_samples(data)
    starts = range(0, largest, step)
    own_step = max(step, -(-rows // len(starts)))  # a collate function may have added rows
    for number, start in enumerate(starts):
        counts = tuple(min(max(count - start, 0), step) for count in micro_batch.counts)
        count = min(max(rows - number * own_step, 0), own_step)
        first = number * own_step if count else 0  # a repeat is of the first samples
        stop = min(first + (count or step), whole)
        own = count if loader.rows_vary else None
        if loader.active is not None:
            loader.active.yielded(loader, counts, stop - first, own=own)
        last = micro_batch.last and start + step >= largest
        piece = slice_samples(data, first, stop, whole)
        yield MicroBatch(piece, count, sum(counts), last, counts, stop - first)


def _may_be_fields(entries: Any, count: int, outermost: bool) -> bool:
    """Return whether entries may be fields: by their types, and by the rows of their tensors.

    Below the batch itself, one tensor that does not fit shows that they are samples.
    """
    tensors = [entry for entry in entries if getattr(entry, "shape", ())]
    fits = any(_holds_rows(entry, count) for entry in entries)
    all_fit = outermost or all(_holds_rows(entry, count) for entry in tensors)
    return holds_fields(entries) and fits and all_fit


def _is_list_of(tree: Any, count: int) -> bool:
    plain = isinstance(tree, list | tuple) and not hasattr(tree, "_fields")
    return plain and len(tree) == count


def _holds_rows(tree: Any, count: int) -> bool:
    """Return whether `tree` is, or holds, a tensor with a row for each sample."""
    shape = getattr(tree, "shape", None)
    if shape is not None:
        return len(shape) > 0 and shape[0] == count
    return is_container(tree) and any(_holds_rows(child, count) for child in children(tree))
