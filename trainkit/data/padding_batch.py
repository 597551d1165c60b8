"""What a process without samples runs through its model, with weight 0 (rule 16)."""

from typing import Any

from trainkit.containers.tree import copy_containers

__all__ = ["PaddingBatch"]


class PaddingBatch:
    """A batch that is kept to be repeated; what is done to one use does not reach the next.

    Containers are copied, tensors are shared.
    """

    def __init__(self) -> None:
        self._data: Any = None
        self.size = 0  # samples of the batch; 0: none is kept

    def keep(self, data: Any, size: int) -> None:
        """Keep `data`, of `size` samples, before others may change it."""
        self._data = copy_containers(data)
        self.size = size

    def take(self) -> Any:
        """Return the batch that was kept."""
        return copy_containers(self._data)
