"""The data of a program: what a user writes, and the batches of each process, read by hand."""

from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from tests.right_programs.models import CLASSES, FEATURES
from tests.right_programs.program import Program
from trainkit.basics import rng

__all__ = ["Part", "evaluation_batches", "evaluation_loader", "training_loader", "windows"]

POSITIONS = 5  # at most, in a ragged row
NAN_ROW = 1

Part = tuple[int, Any] | None
"""What one process has of a global batch: its samples, and the batch; None where it has none."""


def _rows(program: Program, samples: int, seed: int) -> list[Any]:
    """Return rows with their labels."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if program.double else torch.float32
    shape: tuple[int, ...] = (POSITIONS,) if program.form == "ragged" else ()
    inputs = torch.randn(samples, *shape, FEATURES, generator=generator).to(dtype)
    labels = torch.randint(0, CLASSES, (samples, *shape), generator=generator)
    labels[-1] = 0  # so that not all are of an ignored class
    if program.loss == "yes or no":
        labels = nn_one_hot(labels).to(dtype)
    if program.skips_nan and seed != program.seed + 1:
        inputs[NAN_ROW % samples, 0] = torch.nan
    if program.form == "pairs":
        return [*zip(inputs, labels, strict=True)]
    if program.form == "mapping":
        pairs = zip(inputs, labels, strict=True)
        return [{"inputs": x, "labels": y} for x, y in pairs]
    lengths = torch.randint(1, POSITIONS + 1, (samples,), generator=generator).tolist()
    lengths[0] = POSITIONS  # as many as classes would not say in the first batch which is which
    return [(x[:n], y[:n]) for x, y, n in zip(inputs, labels, lengths, strict=True)]


def nn_one_hot(labels: Tensor) -> Tensor:
    """Return a column for each class."""
    return torch.nn.functional.one_hot(labels, CLASSES)


def _noisy(row: Any) -> Any:
    """Return a row with noise from the global generator."""
    if isinstance(row, dict):
        return row | {"inputs": row["inputs"] + 0.1 * torch.randn_like(row["inputs"])}
    return row[0] + 0.1 * torch.randn_like(row[0]), row[1]


class Rows(Dataset[Any]):
    """A map-style data set; augmented, each sample has noise."""

    def __init__(self, rows: list[Any], *, augmented: bool = False) -> None:
        self.rows = rows
        self.augmented = augmented

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):  # the key of a whole batch
            return default_collate([self.rows[each] for each in index])
        return _noisy(self.rows[index]) if self.augmented else self.rows[index]


class Stream(IterableDataset[Any]):
    """Rows one after the other."""

    def __init__(self, rows: list[Any], *, augmented: bool = False) -> None:
        self.rows = rows
        self.augmented = augmented

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            yield _noisy(row) if self.augmented else row


class StatefulStream(Stream):
    """One that knows where it is, and begins anew after its end."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class LastingStream(Stream):
    """One as those of `datasets`: its state at the end is the end, and each pass begins there."""

    start = at = 0

    def __iter__(self) -> Iterator[Any]:
        self.at = self.start
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class Shards(Stream):
    """One that gives each process a part of its own."""

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.rows[index::num_shards])


class Backwards(Sampler[int]):
    """From the last sample to the first; in later epochs turned on, where it is told the epoch."""

    def __init__(self, data: Sized, *, turns: bool = False) -> None:
        self.data = data
        self.turns = turns
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        length = len(self.data)
        return iter([(index + self.epoch) % length for index in reversed(range(length))])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch * self.turns


class Uneven(Sampler[list[int]]):
    """Batches of 1, 2, 3, 1, 2, 3, ... samples, last first; as keys of whole batches, tuples."""

    def __init__(self, data: Sized, *, keys: bool = False) -> None:
        left, size, kind = list(range(len(data))), 1, tuple if keys else list
        self.batches: list[Any] = []
        while left:
            self.batches.append(kind(left[-size:]))
            del left[-size:]
            size = size % 3 + 1

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def pad(rows: list[Any]) -> Any:
    """Return ragged rows as a batch; labels that fill up are ignored."""
    inputs, labels = zip(*rows, strict=True)
    fill: Any = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return fill(inputs), fill(labels, padding_value=-100)


def noisy_collate(collate: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    """Return a batch with one number from the global generator added to all."""
    batch, noise = collate(rows), 0.1 * torch.randn(())
    if isinstance(batch, dict):
        return batch | {"inputs": batch["inputs"] + noise}
    return batch[0] + noise, batch[1]


def others(collate: Callable[[list[Any]], Any], times: int, rows: list[Any]) -> Any:
    """Return a batch that has some rows so many times, but at least one row."""
    inputs = [row["inputs"] if isinstance(row, dict) else row[0] for row in rows]
    many = [times if x.sum() < 0 else 1 for x in inputs]
    kept = [row for row, number in zip(rows, many, strict=True) for _ in range(number)]
    return collate(kept or rows[:1])


def _collate(program: Program, *, trains: bool = True) -> Callable[[list[Any]], Any]:
    collate = pad if program.form == "ragged" else default_collate
    if program.collate == "noisy" and trains:
        return partial(noisy_collate, collate)
    times = {"drops": 0, "repeats": 3}.get(program.collate)
    return collate if times is None else partial(others, collate, times)


def training_loader(program: Program) -> DataLoader[Any]:
    """Return the loader that a user writes."""
    p, rows = program, _rows(program, program.samples, program.seed)
    options: dict[str, Any] = {"collate_fn": _collate(p), "num_workers": p.workers}
    if p.order != "keys of batches":
        options |= {"batch_size": p.batch_size, "drop_last": p.drop_last}
    if p.is_stream:
        kinds: dict[str, type[Stream]] = {
            "stateful stream": StatefulStream,
            "lasting stream": LastingStream,
            "shards": Shards,
        }
        return DataLoader(
            kinds.get(p.source, Stream)(rows, augmented=p.source == "random stream"), **options
        )
    data: Any = Rows(rows, augmented=p.source == "augmented")
    if p.source == "tensors":
        data = TensorDataset(*(torch.stack(part) for part in zip(*rows, strict=True)))
    if p.source == "subset":
        data = Subset(Rows([*reversed(rows), *rows]), range(len(rows) - 1, -1, -1))
    if p.order in ("shuffled", "own generator"):
        own = torch.Generator().manual_seed(7) if p.order == "own generator" else None
        return DataLoader(data, shuffle=True, generator=own, **options)
    if p.order == "weighted":
        weights = [1.0 + index % 3 for index in range(len(rows))]
        return DataLoader(data, sampler=WeightedRandomSampler(weights, len(rows)), **options)
    if p.order == "keys of batches":
        del options["collate_fn"]
        return DataLoader(data, batch_size=None, sampler=Uneven(rows, keys=True), **options)
    if p.order == "uneven batches":
        del options["batch_size"], options["drop_last"]
        return DataLoader(data, batch_sampler=Uneven(rows), **options)
    if p.order in ("own sampler", "by epoch"):
        return DataLoader(data, sampler=Backwards(rows, turns=p.order == "by epoch"), **options)
    return DataLoader(data, **options)


def evaluation_loader(program: Program) -> DataLoader[Any]:
    """Return the loader of an evaluation: other rows, in order."""
    rows = _rows(program, program.evaluation_samples, program.seed + 1)
    collate = _collate(program, trains=False)
    data: Any = Stream(rows) if program.is_stream else Rows(rows)
    if program.source == "lasting stream":
        data = LastingStream(rows)
    return DataLoader(data, batch_size=program.evaluation_batch, collate_fn=collate)


def evaluation_batches(program: Program, *, limited: bool) -> list[Any]:
    """Return the batches of an evaluation; limited as those of `fit` are."""
    rows = _rows(program, program.evaluation_samples, program.seed + 1)
    parts = _cut(rows, program.evaluation_batch)
    if limited and (limit := program.overfit or program.limit_evaluation):
        parts = parts[: limit * program.processes]
    return [*map(_collate(program, trains=False), parts)]


def windows(program: Program, epoch: int) -> list[list[list[Part]]]:
    """Return an epoch: its windows, the global batches in each, and what each process has of it."""
    p = program
    batches = _global_batches(p, 0 if p.overfit else epoch)
    limit = p.overfit or p.limit
    if limit is not None:
        batches = batches[: limit if isinstance(limit, int) else int(len(batches) * limit)]
    cut = _cut(batches, p.accumulation)
    if p.drop_last_window and _samples(cut[-1]) < _samples(cut[0]):
        cut.pop()
    return cut


def _samples(window: list[list[Part]]) -> int:
    return sum(part[0] for batch in window for part in batch if part is not None)


def _global_batches(p: Program, epoch: int) -> list[list[Part]]:
    """Return the global batches of an epoch as rules 13 to 17 say: slices of one order."""
    collate, stream = _collate(p), rng.sample_stream(p.seed, epoch)
    share = p.batch_size // (p.processes if p.split_batches else 1)

    def part(keyed: list[tuple[int | str, Any]]) -> Part:
        if not keyed:
            return None
        with _seeded(rng.in_stream(stream, keyed[0][0])):
            return len(keyed), collate([row for _, row in keyed])

    if p.is_stream:
        keyed = _streamed(p, epoch)
    else:
        loader = training_loader(p)
        order = _order(p, loader, epoch)
        data: Any = loader.dataset
        if p.order == "keys of batches":
            whole = [(len(key), data[key]) for key in order]
            return [_filled(some, p.processes) for some in _cut(whole, p.processes)]
        fetch = partial(_fetched, data, stream)
        if p.order == "uneven batches":
            parts = [part([(index, fetch(index)) for index in batch]) for batch in order]
            return [_filled(some, p.processes) for some in _cut(parts, p.processes)]
        keyed = [(index, fetch(index)) for index in order]
    if p.source == "shards" and p.processes > 1:
        rows, count = [row for _, row in keyed], p.processes
        shards = [  # keyed by the place in the shard
            [(f"{at} of shard {rank} of {count}", row) for at, row in enumerate(rows[rank::count])]
            for rank in range(count)
        ]
        of_each = [_cut(shard, share) for shard in shards]
        many = max(map(len, of_each))
        batches = [[own[k] if k < len(own) else [] for own in of_each] for k in range(many)]
    else:
        batches = [
            _filled(_cut(some, share), p.processes, []) for some in _cut(keyed, share * p.processes)
        ]
    if p.drop_last:
        full = share * p.processes
        batches = [batch for batch in batches if sum(map(len, batch)) == full]
    return [[part(own) for own in batch] for batch in batches]


def _order(p: Program, loader: DataLoader[Any], epoch: int) -> list[Any]:
    """Return what the sampler yields in an epoch, under the key of rule 12."""
    sampler: Any = loader.batch_sampler if p.order == "uneven batches" else loader.sampler
    key = rng.order_seed(p.seed, epoch)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with _seeded(key):
        if p.order == "own generator":
            sampler.generator.manual_seed(rng.derive(key, 7))
        return list(sampler)


def _fetched(data: Any, stream: int, index: int) -> Any:
    with _seeded(rng.in_stream(stream, index)):
        return data[index]


def _streamed(p: Program, epoch: int) -> list[tuple[int, Any]]:
    """Return the samples of a stream, each drawn under the key of its place."""
    rows = iter(training_loader(p).dataset)
    keyed: list[tuple[int, Any]] = []
    for at in range(p.samples):
        with _seeded(rng.in_stream(rng.sample_stream(p.seed, epoch), at)):
            keyed.append((at, next(rows)))
    return keyed


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    yield
    torch.set_rng_state(state)


def _cut(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _filled(items: list[Any], size: int, fill: Any = None) -> list[Any]:
    return [*items, *([fill] * (size - len(items)))]
