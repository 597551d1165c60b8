"""Data of a loop of the user's own whose counts are only known once it is read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from trainkit.accelerator.loader import SharedLoader, Sharing, State
from trainkit.data import MicroBatch, PreparedLoader


class StreamedShare(SharedLoader):
    """A loader over an iterable data set, over keys of whole batches, or of another class.

    Every process reads the data set and keeps its slices (rule 17). A last batch is as short
    as the data leaves it; a process that has nothing in the last global batch repeats its last
    batch, none of whose samples counts as real.
    """

    def __init__(self, inner: PreparedLoader, sharing: Sharing) -> None:
        super().__init__(inner, sharing)
        self.full_size = inner.batch_size
        self.draws_of_torch = isinstance(self.source, DataLoader)
        """Whether a new pass takes from torch's generator what torch's own loader takes."""

    @override
    def __len__(self) -> int:
        return len(self._inner)

    @override
    def state_dict(self) -> dict[str, Any]:
        stream = self._inner.stream
        if stream is not None and self._has_ended:
            stream.ended()  # it has been read to its end
        state = super().state_dict() | {"global": self._global_size()}
        return state | ({} if stream is None else {"stream": stream.state_dict()})

    def _global_size(self) -> int | None:
        """Return the samples of a global batch, where a place in the data is known by them."""
        share, stream = self._inner.batch_size, self._inner.stream
        if share is None or stream is None or stream.is_sharded:
            return None
        return int(share) * self._sharing.processes.size

    @override
    def loses_place(self, state_dict: dict[str, Any]) -> str:
        was, now = state_dict.get("global"), self._global_size()
        if now is None or was is None:
            return "its place in the data is not known"
        return "" if was == now else f"samples of a global batch: {was} then, {now} now"

    @override
    def unfit(self, state_dict: dict[str, Any]) -> list[str]:
        if self._inner.stream is not None and state_dict.get("stream"):
            self._inner.stream.check_state_dict(state_dict["stream"])
        return super().unfit(state_dict)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._inner.stream and self._resumption is None and state_dict.get("stream"):
            self._inner.stream.load_state_dict(state_dict["stream"])

    @override
    def _leave(self) -> None:
        super()._leave()
        if self._inner.stream is not None:
            self._inner.stream.left()

    @override
    def _batches(self, skip: int, resumption: State | None) -> Iterator[MicroBatch]:
        if resumption is None and self.draws_of_torch:
            torch.empty((), dtype=torch.int64).random_()
        share, stream = self._inner.batch_size, self._inner.stream
        jumps = share is not None and skip > 0
        saved = (resumption or {}).get("stream")
        if stream and resumption and saved and skip == resumption["batches"]:
            stream.load_state_dict(saved)
            jumps = jumps or saved["state"] is not None
        position = skip * share * self._sharing.processes.size if share is not None else 0
        self._length = self._inner.batches_per_epoch
        batches = self._inner.batches(self.epoch, position=position)
        yield from batches if jumps else islice(batches, skip, None)
