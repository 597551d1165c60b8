"""Data of a loop of the user's own whose counts are only known once it is read."""

from collections.abc import Iterator
from typing import Any

import torch
from typing_extensions import override

from trainkit import rng
from trainkit.accelerator.loader import Batch, Resumption, SharedLoader, Sharing
from trainkit.data import ActiveLoaders, training_loader

__all__ = ["StreamedShare"]

_NO_WINDOWS = 1 << 62  # micro-batches in a window that no epoch fills


class StreamedShare(SharedLoader):
    """A loader over an iterable data set, over keys of whole batches, or of another class.

    Every process reads the data set and keeps its slices (rule 17). A last batch is as short
    as the data leaves it; a process that has nothing in the last round repeats its last batch,
    none of whose samples counts as real.

    Args:
        source: The user's loader.
        sharing: How it is shared out.
    """

    def __init__(self, source: Any, sharing: Sharing) -> None:
        super().__init__(source, sharing)
        seed = int(sharing.processes.broadcast_object(torch.initial_seed()))
        self._relay = ActiveLoaders()
        self._inner = training_loader(
            source,
            processes=sharing.processes,
            device=sharing.device,
            seed=rng.derive(seed, "own loop"),
            split_batches=sharing.configuration.split_batches,
            active=self._relay,
            may_be_empty=True,
        )

    @override
    def __len__(self) -> int:
        return len(self._inner)

    @override
    def state_dict(self) -> dict[str, Any]:
        stream = self._inner.stream
        if stream is not None and self._has_ended:
            stream.ended()  # it has been read to its end
        return super().state_dict() | ({} if stream is None else {"stream": stream.state_dict()})

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
    def close(self) -> None:
        self._inner.close()

    @override
    def _batches(self, skip: int, resumption: Resumption | None) -> Iterator[Batch]:
        share, stream = self._inner.batch_size, self._inner.stream
        jumps = share is not None and skip > 0
        if stream and resumption and resumption.stream and skip == resumption.batches:
            stream.load_state_dict(resumption.stream)
            jumps = jumps or resumption.stream["state"] is not None
        position = skip * share * self._sharing.processes.size if share is not None else 0
        length = self._inner.batches_per_epoch
        windows = self._inner.windows(self.epoch, position=position, accumulation=_NO_WINDOWS)
        index = skip if jumps else 0
        for window in windows:
            for part in window:
                index += 1
                if index <= skip:
                    continue
                info = self._relay.current()
                assert info is not None
                left = 0 if part.last else None if length is None else length - index
                has = (True,) * len(info.counts)
                yield Batch(part.data, info.counts, info.local_size, has, left, part.last)
