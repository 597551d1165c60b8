"""The prepared loader of a loop of the user's own, by the data rules of Accelerate."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.settings import DataLoaderConfiguration
from trainkit.data import MicroBatch, PreparedLoader
from trainkit.data.order_facts import changed_facts, order_facts
from trainkit.distributed.active_batches import ActiveLoaders
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from trainkit.distributed import Processes

State: TypeAlias = dict[str, Any]
"""Where a loader was, as its `state_dict` says it."""


@dataclass(kw_only=True, slots=True)
class Sharing:
    """How loaders are shared out.

    Args:
        device: Where the batches go, by themselves if `moves`.
        rng_types: Which generators are those of process 0 when a pass begins: "generator" (the
            sampler's own), "torch", the type of a device.
        active: Told where a pass is, and which samples of a batch are real.
        accumulation: Told where a pass ends.
    """

    processes: "Processes"
    device: torch.device
    moves: bool = True
    configuration: DataLoaderConfiguration
    rng_types: tuple[str, ...]
    active: ActiveLoaders
    accumulation: Accumulation


class SharedLoader(DataLoader[Any], ABC):
    """A loader whose batches are shared out over the processes.

    A pass that was under way when `state_dict` was called can be gone on with: the first pass
    after `load_state_dict` has the same order again, and `skip_first_batches` leaves out what had
    been consumed; a stateful loader does so by itself. Other attributes are those of `source`.

    Args:
        inner: Reads the batches of this process from the user's loader.
    """

    fills_up = False  # whether `even_batches` says anything
    skip_batches = 0
    may_lack_batches = False  # whether a process may have none where others have one

    def __init__(self, inner: "PreparedLoader | SharedLoader", sharing: Sharing) -> None:
        self.source: Any = inner.source
        self.full_size: int | None = None
        """Samples of a full batch of this process; None: it varies."""
        self.even_batches = sharing.configuration.even_batches
        """Whether short last batches are filled up."""
        self.epoch = 0
        """Complete passes, or what `set_epoch` was told."""
        self.use_stateful_dataloader = sharing.configuration.use_stateful_dataloader
        self.dispatches = sharing.configuration.dispatch_batches
        self._inner: Any = inner
        self._rows_vary: bool = getattr(inner, "rows_vary", False)
        self._sharing = sharing
        self._position = 0  # batches yielded by the pass under way
        self._length: int | None = None  # batches of the pass under way; None: not known
        self._order: Any = None  # of the pass under way
        self._pass: object = None  # the latest one
        self._has_ended = False  # whether the pass under way has yielded its last batch
        self._resumption: State | None = None  # saved inside the pass that comes next
        self._ended_at: int | None = None  # batches of the pass that a loaded state had ended

    @abstractmethod
    def _batches(self, skip: int, resumption: State | None) -> Iterator[MicroBatch]:
        """Yield the batches of a pass from number `skip` on, of which `last` ends the pass.

        Sets `_order` and `_length` before the first.

        Args:
            resumption: What was saved inside of the pass, where it goes on.
        """

    @override
    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches of this process; TypeError where it is not known."""

    @override
    def __iter__(self) -> Any:
        """Yield the batches of this process."""
        return self.iterate(None)

    def iterate(self, skip: int | None) -> Iterator[Any]:
        """Return the batches of this process from number `skip` on."""
        return self._iterate(skip, self._sharing.active.changes())

    def _iterate(self, skip: int | None, since: int) -> Iterator[Any]:
        resumption, self._resumption = self._resumption, None
        ended_at, self._ended_at = self._ended_at, None
        if skip is not None and skip == ended_at:
            return  # nothing is left of the pass that the state was saved in
        if skip is None:
            goes_on = self.use_stateful_dataloader and resumption is not None
            skip = resumption["batches"] if goes_on and resumption else 0
        active = self._sharing.active
        self._position = skip
        self._pass = this = object()
        active.began(this, self, since)
        batches = self._batches(skip, resumption)
        try:
            for batch in batches:
                self._position += 1
                self._has_ended = batch.last
                left = None if self._length is None else self._length - self._position
                own = batch.count if self._rows_vary else None
                active.yielded(
                    this, batch.counts, batch.size, self.full_size, own, 0 if batch.last else left
                )
                yield batch.data
            self.epoch += 1
        finally:
            if self._pass is this:
                self._leave()
            active.ended(this)
            self._sharing.accumulation.pass_ended()

    def _leave(self) -> None:
        """Forget the pass under way, which is complete or was left."""
        self._position, self._order, self._has_ended = 0, None, False

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is; data set and samplers hear of it."""
        self.epoch = epoch

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the loader under way has yielded its last batch."""
        return self._sharing.accumulation.end_of_dataloader

    @property
    def iteration(self) -> int:
        """`epoch`; may be set."""
        return self.epoch

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.epoch = value

    @property
    def gradient_state(self) -> Accumulation:
        """The windows that its end may end."""
        return self._sharing.accumulation

    @property
    def device(self) -> torch.device:
        """Where the batches come to be."""
        return self._sharing.device if self._sharing.moves else torch.device("cpu")

    @property
    def base_dataloader(self) -> Any:
        """The user's loader."""
        return self.source

    @property
    def total_batch_size(self) -> int:
        """Samples of a full global batch over all processes."""
        given: Any = self.source.batch_size
        if given is None:
            given = getattr(self.source.batch_sampler, "batch_size", 1)
        split = self._sharing.configuration.split_batches
        return int(given) * (1 if split else self._sharing.processes.size)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set."""
        return len(self.source.dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is; equal on all processes."""
        return {
            "epoch": self.epoch,
            "batches": self._position,
            "has_ended": self._has_ended,
            "order": self._order,
            "facts": self.order_facts(),
            "digest": self._order_digest(),
        }

    def order_facts(self) -> dict[str, Any]:
        """Return what is known of how the samples are ordered, by names for people."""
        return order_facts(self.source)

    def _order_digest(self) -> str | None:
        """Return what tells the order of `_order` from others, where it is known."""
        return None

    def come_to(self, state_dict: dict[str, Any], objects: Sequence[Any]) -> str:
        """Let a sampler with a random state of its own come to where it was between two passes.

        Args:
            objects: What is registered; it comes back by itself.

        Returns:
            Why it does not, in words; else nothing.
        """
        return ""

    def unfit(self, state_dict: dict[str, Any]) -> list[str]:
        """Return, in words, why the rest of a pass would not be that of a saved state."""
        if not state_dict["batches"] or state_dict["has_ended"] or "facts" not in state_dict:
            return []
        return changed_facts(state_dict["facts"], self.order_facts())

    @abstractmethod
    def loses_place(self, state_dict: dict[str, Any]) -> str:
        """Return why the pass of a saved state cannot go on here, in words; else nothing.

        Args:
            state_dict: What another number of processes saved inside a pass.
        """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next pass be the one that was under way, if there was one."""
        self.epoch = state_dict["epoch"]
        self._resumption = self._ended_at = None
        if state_dict["has_ended"]:
            self.epoch += 1
            self._ended_at = state_dict["batches"]
        elif state_dict["batches"]:
            self._resumption = state_dict

    def close(self) -> None:
        """Stop what runs in the background; a later pass starts it again."""
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        """Return what else the user's loader has."""
        if name.startswith("_") or name == "source":
            raise AttributeError(f"`{type(self).__name__}` has no attribute {name!r}.")
        return getattr(self.source, name)


class SkippedLoader(DataLoader[Any]):
    """A loader without its first batches, in every pass.

    Args:
        source: A prepared loader, which does not read what is left out, or any other.
    """

    def __init__(self, source: Any, skipped: int) -> None:
        self.source = source
        self.skipped = self.skip_batches = skipped

    @override
    def __iter__(self) -> Any:
        if isinstance(self.source, SharedLoader):
            return self.source.iterate(self.skipped)
        return islice(self.source, self.skipped, None)

    @override
    def __len__(self) -> int:
        return max(0, len(self.source) - self.skipped)

    def __getattr__(self, name: str) -> Any:
        """Return what else the loader inside has."""
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> SkippedLoader:
    """Return a loader without its first batches, to go on in the middle of an epoch.

    Args:
        dataloader: A prepared loader, or any other.
        num_batches: Batches of this process to leave out.
    """
    if num_batches < 0:
        raise ConfigError(f"`num_batches` must be at least 0, but is {num_batches}.")
    if isinstance(dataloader, SkippedLoader):
        return SkippedLoader(dataloader.source, dataloader.skipped + num_batches)
    return SkippedLoader(dataloader, num_batches)
