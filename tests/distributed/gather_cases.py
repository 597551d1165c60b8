"""Random cases of a distributed evaluation: what each process computes, and what must come out."""

import enum
import random
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Pair = namedtuple("Pair", ["logits", "names"])


class Label(enum.Enum):  # has no form in the codec: travels by pickle
    EVEN = 0
    ODD = 1


@dataclass(frozen=True)
class Output:
    scores: torch.Tensor
    names: list[str]
    nothing: None = None


ONE_EACH = ("ragged", "ragged in lists", "objects")
"""What is a list of one object per sample only if the caller says so: there are tensors in it, or
objects that travel by pickle."""

Collate = Callable[[list[int]], Any]
"""Makes what a model would return for the samples of a batch; equal samples, equal entries."""


def _rows(dtype: torch.dtype, *later: int) -> Collate:
    def collate(samples: list[int]) -> torch.Tensor:
        size = int(np.prod(later))
        values = [(index * 31 + offset) % 97 for index in samples for offset in range(size)]
        return torch.tensor(values).reshape(len(samples), *later).to(dtype)

    return collate


def _names(samples: list[int]) -> list[str]:
    return [f"sample {index}" + "é" * (index % 3) for index in samples]


def _ragged(samples: Iterable[int]) -> list[torch.Tensor]:
    return [torch.arange(index % 4) + index for index in samples]


def _padded(samples: list[int]) -> torch.Tensor:
    lengths = [index % 4 + 1 for index in samples]
    batch = torch.full((len(samples), max(lengths, default=0)), -100)
    for row, (index, length) in enumerate(zip(samples, lengths, strict=True)):
        batch[row, :length] = index
    return batch


_float, _label = _rows(torch.float32, 3), _rows(torch.int64)

COLLATES: dict[str, Collate] = {
    **{
        str(dtype): _rows(dtype, *later)
        for dtype, later in [
            (torch.float64, (2, 2)),
            (torch.float32, ()),
            (torch.float16, (3,)),
            (torch.bfloat16, (1,)),
            (torch.int64, ()),
            (torch.int32, (2,)),
            (torch.int16, (2,)),
            (torch.uint8, (0, 2)),
            (torch.bool, (4,)),
            (torch.complex64, ()),
        ]
    },
    "padded": _padded,
    "ragged": _ragged,
    "names": _names,
    "tuple of names": lambda samples: tuple(_names(samples)),
    "objects": lambda samples: [Label(index % 2) for index in samples],
    "tokens": lambda samples: [[index] * (index % 4) for index in samples],
    "records": lambda samples: [{"id": index, "box": torch.ones(index % 5)} for index in samples],
    "pair": lambda samples: (_float(samples), _label(samples)),
    "list of two": lambda samples: [_float(samples), _label(samples)],
    "ragged in lists": lambda samples: [_ragged(range(index % 3)) for index in samples],
    "pairs of texts": lambda samples: [(str(index), "x" * (index % 3)) for index in samples],
    "texts and tokens": lambda samples: (_names(samples), [[index] * 2 for index in samples]),
    "tensors of a sample": lambda samples: [{"ids": ids} for ids in _ragged(samples)],
    "nested lists": lambda samples: [[_float(samples), _label(samples)], _names(samples)],
    "nested": lambda samples: {
        "a": [_float(samples), {"b": _label(samples)}],
        3: (_names(samples), None, {"deep": (_padded(samples),)}),
    },
    "named tuple": lambda samples: Pair(_float(samples), _names(samples)),
    "data class": lambda samples: Output(_float(samples), _names(samples)),
    "array": lambda samples: np.array(samples, dtype=np.float32).reshape(-1, 1),
    "text array": lambda samples: {"names": np.array(_names(samples), dtype=str)},
}


@dataclass(frozen=True)
class Case:
    """An evaluation of `length` samples on `size` processes."""

    kind: str
    length: int
    size: int
    batch_size: int  # on each process

    def global_batches(self) -> list[list[int]]:
        step = self.size * self.batch_size
        return [
            list(range(start, min(start + step, self.length)))
            for start in range(0, self.length, step)
        ]

    def counts(self, batch: list[int]) -> tuple[int, ...]:
        return tuple(len(self.local(batch, rank)) for rank in range(self.size))

    def local(self, batch: list[int], rank: int) -> list[int]:
        return batch[rank * self.batch_size : (rank + 1) * self.batch_size]

    def computed(self, rank: int) -> list[list[int]]:
        """The samples that process `rank` computes in each batch; a repeat where it has none."""
        last = [0]
        computed = []
        for batch in self.global_batches():
            last = self.local(batch, rank) or last
            computed.append(last)
        return computed


def random_case(seed: int, size: int) -> Case:
    draw = random.Random(seed)
    kind = draw.choice(list(COLLATES))
    return Case(kind, draw.randrange(34), size, draw.randint(1, 5))


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal in type, dtype, shape and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype.kind == right.dtype.kind and np.array_equal(left, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, Output):
        return same(vars(left), vars(right))
    return bool(left == right)
