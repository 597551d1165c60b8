"""Iterable data sets that know where they are, each in a way of its own."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

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


class Continuing(Counting):
    """Each pass yields what comes next."""

    def __iter__(self) -> Iterator[Sample]:
        while True:
            self.position += 1
            yield sample(self.position - 1)
            if self.position % self.length == 0:
                return


class Epochs(Counting):
    """Counts its passes, and orders each in its own way."""

    def __init__(self, length: int = 22) -> None:
        super().__init__(length)
        self.passes = 0

    def __iter__(self) -> Iterator[Sample]:
        order = random.Random(self.passes).sample(range(self.length), self.length)
        for index in order[self.position :]:
            self.position += 1
            yield sample(index)
        self.position = 0
        self.passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.passes = state["position"], state["passes"]


class Ending(Counting):
    """Begins anew, but after a load; so after a pass the state is its end."""

    start = 0

    def __iter__(self) -> Iterator[Sample]:
        self.position, self.start = self.start, 0
        while self.position < self.length:
            self.position += 1
            yield sample(self.position - 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["position"]


class Sticking(Ending):
    """Begins each pass where a state was loaded, as those of Hugging Face do in the same epoch."""

    def __iter__(self) -> Iterator[Sample]:
        for index in range(self.start, self.length):
            self.position = index + 1
            yield sample(index)


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


class Wrapping(IterableDataset[Sample]):
    """One of Hugging Face inside, which hears of no epochs."""

    def __init__(self, length: int = 22) -> None:
        self.inner = huggingface(length)

    def __iter__(self) -> Iterator[Sample]:
        return (sample(row["x"]) for row in self.inner)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


def huggingface(length: int = 22) -> Any:
    """Return the numbers from 0 on as an iterable data set of `datasets`, in two shards."""
    from datasets import Dataset

    return Dataset.from_dict({"x": [*range(length)]}).to_iterable_dataset(num_shards=2)


def interleaved() -> Any:
    """Return two of Hugging Face in turns, drawn anew in each epoch."""
    from datasets import interleave_datasets

    parts = [huggingface(), huggingface()]
    return interleave_datasets(parts, probabilities=[0.5, 0.5], seed=1)


def shuffled() -> Any:
    """Return one of Hugging Face with a shuffle buffer."""
    return huggingface().shuffle(seed=3, buffer_size=4)


def collate(items: list[Any]) -> Any:
    """Return a batch of samples, or of the rows of Hugging Face."""
    rows = isinstance(items[0], dict)
    return default_collate([sample(item["x"]) for item in items] if rows else items)


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
