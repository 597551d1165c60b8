"""Iterable data sets that know where they are, each in a way of its own."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

Sample = tuple[Tensor, Tensor]


def sample(index: int) -> Sample:
    """Return a sample with noise from the global generators."""
    return torch.tensor([index, random.random()], dtype=torch.float64), torch.zeros(1).double()


class Counting(IterableDataset[Sample]):
    """The numbers from 0 on; the object itself counts."""

    def __init__(self, length: int = 22) -> None:
        self.length = length
        self.position = 0

    def __iter__(self) -> Iterator[Sample]:
        while self.position < self.length:
            self.position += 1
            yield sample(self.position - 1)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Shuffling(Counting):
    """Draws the order of an epoch from the global generators when the epoch begins."""

    def __iter__(self) -> Iterator[Sample]:
        order = torch.randperm(self.length).tolist()
        for index in order[self.position :]:
            self.position += 1
            yield sample(index)
        self.position = 0


class Buffering(IterableDataset[Sample]):
    """A shuffle buffer with a generator of its own; its state is not a copy."""

    def __init__(self, length: int = 22) -> None:
        self.length = length
        self.state: dict[str, Any] = {"next": 0, "buffer": [], "draws": 1}

    def __iter__(self) -> Iterator[Sample]:
        state = self.state
        while state["next"] < self.length or state["buffer"]:
            while state["next"] < self.length and len(state["buffer"]) < 5:
                state["buffer"].append(state["next"])
                state["next"] += 1
            state["draws"] = state["draws"] * 1103515245 % 2**31
            chosen = state["draws"] % len(state["buffer"])
            yield sample(state["buffer"].pop(chosen))
        state["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Drawing(Buffering):
    """A shuffle buffer that draws from the global generators."""

    def __iter__(self) -> Iterator[Sample]:
        state = self.state
        while state["next"] < self.length or state["buffer"]:
            while state["next"] < self.length and len(state["buffer"]) < 5:
                state["buffer"].append(state["next"])
                state["next"] += 1
            yield sample(state["buffer"].pop(random.randrange(len(state["buffer"]))))
        state["next"] = 0


class _Walk:
    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0

    def __iter__(self) -> "_Walk":
        return self

    def __next__(self) -> Sample:
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return sample(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor([self.position])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["at"])


class Walking(IterableDataset[Sample]):
    """Its iterators have the state."""

    def __init__(self, length: int = 22) -> None:
        self.length = length

    def __iter__(self) -> _Walk:
        return _Walk(self.length)


class Stateless(IterableDataset[Sample]):
    """Cannot say where it is."""

    def __init__(self, length: int = 22) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Sample]:
        return map(sample, range(self.length))


class Sharded(Counting):
    """Files of unequal lengths; a shard has some of them."""

    def __init__(self, files: tuple[int, ...] = (9, 3, 2, 1, 6)) -> None:
        self.files = [(100 * number, length) for number, length in enumerate(files)]
        self.position = 0

    def shard(self, num_shards: int, index: int) -> "Sharded":
        part = type(self)()
        part.files = self.files[index::num_shards]
        return part

    def __iter__(self) -> Iterator[Sample]:
        samples = [first + index for first, length in self.files for index in range(length)]
        for index in samples[self.position :]:
            self.position += 1
            yield sample(index)
        self.position = 0


class Merging(Sharded):
    """Files that say which samples were read, and so can be shared out anew."""

    def __init__(self, files: tuple[int, ...] = (9, 3, 2, 1, 6)) -> None:
        super().__init__(files)
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Sample]:
        done = set(self.read)
        for first, length in self.files:
            for index in range(first, first + length):
                if index not in done:
                    self.read.append(index)
                    yield sample(index)
        self.read = []

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = list(state["read"])

    @staticmethod
    def merge_state_dicts(states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"read": [index for state in states for index in state["read"]]}
