"""Turns the indices of a batch into a batch, under the keys of its samples (rules 13, 18)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from typing_extensions import override

from trainkit.basics import rng
from trainkit.containers.tree import children, is_array, is_container, is_opaque
from trainkit.data.loader import LoaderContext
from trainkit.data.own_generators import SampleStreams
from trainkit.errors import DataError


class Recounted(NamedTuple):
    """A batch that has other rows than one for each sample that was asked for."""

    data: Any
    rows: int


@dataclass(frozen=True, slots=True)
class RankBatch:
    """What one process has of a global batch.

    Args:
        count: Its samples; 0 where it has none.
        data: Their batch, perhaps `Recounted`; None where it has none.
        fallback: A batch of the stream's first samples and its rows, for a process that never
            had any.
        state: Where the data set is after it; None where it has no `state_dict`.
        first: Digest of the first sample of the stream, where that was read.
    """

    count: int
    data: Any = None
    fallback: tuple[Any, int] | None = None
    state: Any = None
    first: str | None = None


class Fetch(ABC):
    """What turns one task into one batch, here or in a worker; holds no state of a pass.

    Args:
        dataset: The data set that workers see.
    """

    seeds: bool = False  # whether it seeds generators and leaves them changed
    rows_vary: bool = False  # whether a batch may be `Recounted`

    def __init__(self, dataset: Any, context: LoaderContext) -> None:
        self.dataset = dataset
        self.seed = context.seed
        self.in_training = context.trains  # an evaluation has no epochs to speak of

    @abstractmethod
    def fetch(self, epoch: int, task: Any) -> Any:
        """Return the batch that `task` names."""

    def note(self, error: Exception, where: str, epoch: int) -> None:
        """Add to an error where it came from; one that would end the epoch is replaced."""
        when = f"epoch {epoch}" if self.in_training else "while evaluating"
        place = f"{where} of the data set `{type(self.dataset).__name__}`, {when}."
        if isinstance(error, StopIteration):  # a loop over batches would take it for their end
            raise DataError(f"`StopIteration` was raised {place}") from error
        error.add_note(f"Raised {place}")


class _TensorFetch(Fetch):
    """Selects the rows of a `TensorDataset` at once; nothing is drawn, nothing is a view."""

    def __init__(
        self, dataset: Any, context: LoaderContext, base: TensorDataset, mapping: Any
    ) -> None:
        super().__init__(dataset, context)
        self._tensors = base.tensors
        self._mapping = None if mapping is None else torch.as_tensor(mapping, dtype=torch.int64)

    @override
    def fetch(self, epoch: int, task: Any) -> list[Tensor]:
        try:
            index = task if type(task) is Tensor else torch.as_tensor(task, dtype=torch.int64)
            if self._mapping is not None:
                index = self._mapping[index]
            return [tensor.index_select(0, index) for tensor in self._tensors]
        except Exception as error:
            self.note(error, f"while it read the samples {_listed(task)}", epoch)
            raise


class _CollatedFetch(Fetch):
    """Reads samples and lets `collate_fn` make a batch of them."""

    def __init__(self, loader: DataLoader[Any], context: LoaderContext) -> None:
        super().__init__(loader.dataset, context)
        self._collate: Any = loader.collate_fn
        # Whether random numbers may be drawn for a batch, and for its samples.
        self._seeds_collate = context.sample_seeding and not collates_silently(self._collate)
        self._seeds_samples = context.sample_seeding and not _is_silent(self.dataset)
        self.seeds = self._seeds_collate or self._seeds_samples
        self.streams = SampleStreams(self.dataset, self._collate)

    @override
    def fetch(self, epoch: int, task: Any) -> Any:
        streams = self.streams
        if self.seeds and epoch != streams.epoch:
            streams.begin(epoch)
        if not streams.own:
            return self._fetch(epoch, task, rng.seed_host)
        with streams.preserved():
            return self._fetch(epoch, task, streams.seed)

    @abstractmethod
    def _fetch(self, epoch: int, task: Any, seed: Callable[[int], None]) -> Any:
        """Return the batch of a task; `seed` seeds the generators by a key."""

    def _collated(self, samples: Any, indices: list[Any], epoch: int) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            name = getattr(self._collate, "__qualname__", type(self._collate).__name__)
            where = f"while `{name}` made a batch of the samples {_listed(indices)}"
            self.note(error, where, epoch)
            raise


class _SampleFetch(_CollatedFetch):
    """Reads the samples of a batch: one after the other, or at once by `__getitems__`."""

    def __init__(
        self, loader: DataLoader[Any], context: LoaderContext, base: Any, mapping: Any
    ) -> None:
        super().__init__(loader, context)
        self._base = base
        self._mapping = mapping
        self._at_once = _hands_out_batches(base)
        self.rows_vary = self._collate is not default_collate or (
            self._at_once and not _is_silent(base)
        )

    @override
    def _fetch(self, epoch: int, task: Any, seed: Callable[[int], None]) -> Any:
        indices = _as_list(task)
        base, mapping, seeds = self._base, self._mapping, self._seeds_samples
        stream, streams = rng.sample_stream(self.seed, epoch) if self.seeds else 0, self.streams
        samples: Any = [None] * len(indices)
        position: int | None = None  # of the sample that is read alone
        key = 0
        try:
            if self._at_once:
                inner = indices if mapping is None else [mapping[index] for index in indices]
                if seeds:
                    seed(sample_key(stream, indices[0]))
                samples = base.__getitems__(inner)
                if seeds and streams.is_new and streams.finds_more():
                    streams.seed(sample_key(stream, indices[0]))
                    samples = base.__getitems__(inner)
            else:
                for position, index in enumerate(indices):
                    if seeds:
                        whole = type(index) is int
                        key = (rng.in_stream if whole else sample_key)(stream, index)
                        seed(key)
                    samples[position] = base[index if mapping is None else mapping[index]]
                    if seeds and streams.is_new and streams.finds_more():
                        seed = streams.seed
                        seed(key)
                        samples[position] = base[index if mapping is None else mapping[index]]
        except Exception as error:
            where = f"while it read the samples {_listed(indices)}"
            if position is not None:
                where = f"at sample {indices[position]!r}"
            self.note(error, where, epoch)
            raise
        if self._seeds_collate:
            seed(sample_key(stream, indices[0]))
        data = self._collated(samples, indices, epoch)
        return recounted(data, samples, len(indices)) if self.rows_vary else data


class _KeyFetch(_CollatedFetch):
    """Asks the data set for whole batches by the sampler's keys (`batch_size=None`)."""

    @override
    def _fetch(self, epoch: int, task: Any, seed: Callable[[int], None]) -> Any:
        if self.seeds:
            seed(sample_key(rng.sample_stream(self.seed, epoch), task))
        try:
            samples = self.dataset[task]
        except Exception as error:
            self.note(error, f"at key {task!r}", epoch)
            raise
        return self._collated(samples, [task], epoch)


def fetch_for(loader: DataLoader[Any], context: LoaderContext) -> Fetch:
    """Return the cheapest way to fetch the batches of a map-style `loader`."""
    if loader.batch_sampler is None:
        return _KeyFetch(loader, context)
    base, mapping = _look_through(loader.dataset)
    if type(base) is TensorDataset and loader.collate_fn is default_collate:
        tensors = base.tensors
        if all(type(t) is Tensor and t.layout == torch.strided and t.is_cpu for t in tensors):
            return _TensorFetch(loader.dataset, context, base, mapping)
    return _SampleFetch(loader, context, base, mapping)


def counted(data: Any, asked: int) -> tuple[Any, int]:
    """Return a batch, and its rows: as many as samples were asked for, where none were counted."""
    return data if type(data) is Recounted else (data, asked)


def recounted(data: Any, samples: Any, asked: int) -> Any:
    """Return a batch, `Recounted` where it has other rows than samples were asked for.

    It has one for each sample that is not None. If all that it holds has another length, that
    counts, where something says that it is rows: so many samples came, an array has no other
    dimension or those of images, or behind the first those of a sample. What may as well be packed
    in one row, have time in dimension 0, or be joined, as graphs are, counts by samples.

    Args:
        data: What the collate function made.
        samples: Of these; what `__getitems__` returned may be no list of them.
        asked: How many samples were asked for.
    """
    came = [one for one in samples if one is not None] if isinstance(samples, list) else []
    rows = len(came) if isinstance(samples, list) and len(samples) == asked else asked
    fields = data.values() if type(data) is dict else data if type(data) in (list, tuple) else ()
    if rows == asked and {type(f) is Tensor and f.shape[:1] for f in fields} == {(asked,)}:
        return data  # as most are, and as what follows would find
    if rows == asked and {s and s[:1] for s in _shapes(data, _length)} <= {(), (asked,)}:
        return data
    of_each = [_shapes(one, lambda _, shapes: shapes) for one in came]
    of_samples = {shape for shapes in of_each for shape in shapes}

    def entries(items: Any, shapes: list[_Shape]) -> list[_Shape]:
        """Take a list for samples, or for fields of samples, if shapes say so."""
        if of_samples.intersection(shapes):
            return _length(items, shapes)
        return shapes if of_samples >= {s and s[1:] for s in shapes} else [None]

    are_samples = any(item is one for item in children(data) for one in came)
    shapes = [(len(data),)] if are_samples else [s for s in _shapes(data, entries) if s != ()]
    sizes = {shape[0] if shape else None for shape in shapes}
    size = next(iter(sizes), None)
    if len(sizes) == 1 and size is not None and size != rows:
        behind = {shape[1:] for shape in shapes if shape}
        is_rows = any(math.prod(shape) == 1 or len(shape) > 2 for shape in behind)
        is_time = any(shape[:1] == (rows,) for shape in behind)
        by_field = zip(*of_each, strict=False)
        is_joined = any(sum(shape[0] for shape in field if shape) == size for field in by_field)
        is_rows = is_rows and not is_time and not is_joined
        if size in (0, len(came)) or is_rows or behind & of_samples - {()}:
            rows = size
    return data if rows == asked else Recounted(data, rows)


_Shape: TypeAlias = tuple[int, ...] | None
"""None: of an object that holds arrays in its own way, or of a list of which nothing is known."""


def _shapes(
    tree: Any, entries: Callable[[Any, list[_Shape]], list[_Shape]], inner: bool = False
) -> list[_Shape]:
    """Return the shapes of arrays and numbers, and the lengths of lists of other leaves.

    `entries` says what counts of a list of arrays or containers, but for the outermost one, which
    is one of fields.
    """
    if is_array(tree):
        return [tuple(tree.shape)]
    if isinstance(tree, Number):
        return [()]
    if is_opaque(tree):
        return [None]
    inside = [*children(tree)]
    shapes = [shape for child in inside for shape in _shapes(child, entries, True)]
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        if not any(is_array(i) or is_container(i) or is_opaque(i) for i in inside):
            return _length(tree, shapes)
        return entries(tree, shapes) if inner else shapes
    return shapes


def _length(items: Any, _: list[_Shape]) -> list[_Shape]:
    return [(len(items),)]


def collates_silently(collate: Any) -> bool:
    """Return whether `collate` is known to draw no random numbers."""
    return collate is default_collate or collate is default_convert


def sample_key(stream: int, index: Any) -> int:
    """Return the seed of sample `index`; equal integers of other types have the same."""
    if type(index) is not int and type(index) is not str:
        whole = isinstance(index, Tensor) and index.numel() == 1
        index = int(index) if whole or type(index).__module__ == "numpy" else repr(index)
    return rng.in_stream(stream, index)


def _look_through(dataset: Any) -> tuple[Any, list[Any] | None]:
    """Return the data set under plain subsets, and its index for each outer one."""
    mapping: list[Any] | None = None
    while type(dataset) is Subset:
        inner = dataset.indices
        mapping = list(inner) if mapping is None else [inner[index] for index in mapping]
        dataset = dataset.dataset
    return dataset, mapping


def _hands_out_batches(dataset: Any) -> bool:
    if type(dataset) is StackDataset:
        # Its own method falls back to single samples, which want a key each.
        parts = dataset.datasets
        return all(map(_hands_out_batches, parts.values() if isinstance(parts, dict) else parts))
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return False
    return callable(getattr(dataset, "__getitems__", None))


def _is_silent(dataset: Any) -> bool:
    """Return whether `dataset` is known to draw no random numbers."""
    kind = type(dataset)
    if kind is TensorDataset or kind is list or kind is tuple:
        return True
    if kind is Subset:
        return _is_silent(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(_is_silent, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(_is_silent, parts.values() if isinstance(parts, dict) else parts))
    if (kind.__module__, kind.__name__) == ("datasets.arrow_dataset", "Dataset"):
        return bool(dataset.format["type"] != "custom")  # "custom" is a transform
    return False


def _as_list(task: Any) -> list[Any]:
    return task.tolist() if type(task) is Tensor else task


def _listed(task: Any) -> str:
    indices = _as_list(task)
    shown = ", ".join(repr(index) for index in indices[:32])
    return f"[{shown}, ... {len(indices)} in all]" if len(indices) > 32 else f"[{shown}]"
