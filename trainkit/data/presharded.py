"""A mark for loaders that each process has made over its own share already (rule 17)."""

from collections.abc import Iterator
from typing import Any

__all__ = ["Presharded", "presharded"]


class Presharded:
    """A loader that holds this process's own share of the data.

    Args:
        loader: An iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def presharded(loader: Any) -> Presharded:
    """Mark `loader` as holding this process's own share, so that trainkit does not cut it again.

    The shares may differ in length: a process that runs out takes part in the others' steps with
    weight 0. Each needs at least one batch.
    """
    return Presharded(loader)
