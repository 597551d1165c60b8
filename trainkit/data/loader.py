"""PreparedLoader: what the training loop and the evaluation read batches from."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainkit.data.transfer import transfer_for
from trainkit.data.window import MicroBatch, Window
from trainkit.distributed.active_batches import ActiveLoaders
from trainkit.distributed.processes import Processes
from trainkit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from trainkit.data.position import StreamPosition


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderContext:
    """What a loader is prepared for.

    Args:
        moves: Whether they go there by themselves; else whoever reads them moves them.
        seed: The seed of the run, or of evaluation.
        trains: Training's rules or evaluation's (epochs, `set_epoch`, `drop_last`).
        split_batches: Whether the loader's batch size is that of all processes together.
        sample_seeding: Whether data sets that may draw random numbers run under keys.
        active: Told which batch is under way; None where nobody asks.
        may_be_empty: Whether training's rules hold, but an epoch may have no step.
    """

    processes: Processes
    device: torch.device
    moves: bool = True
    seed: int
    trains: bool
    split_batches: bool = False
    sample_seeding: bool = True
    active: ActiveLoaders | None = None
    may_be_empty: bool = False


class EpochLength(NamedTuple):
    """What an epoch turned out to have, once that is known.

    Args:
        left: Windows from where its pass began.
        windows: Windows in all.
        samples: Over all processes; 0 where only the windows are known.
    """

    left: int
    windows: int
    samples: int


class PreparedLoader(ABC):
    """A loader whose samples are shared out over the processes, each used exactly once an epoch.

    Every process gets equally many micro-batches; one without samples for a micro-batch that
    others have gets a repeat with `count` 0 (rule 16). The order depends on seed and epoch
    only, and a pass changes no global generator.

    Args:
        source: The loader of the user.
        context: What it is prepared for. Passes of `iter(loader)` are the epochs 0, 1, ... of
            training, and always epoch 0 of evaluation.
    """

    batches_per_epoch: int | None = None  # micro-batches of one process; None: not known
    samples_per_epoch: int | None = None  # over all processes, after `drop_last`; None: not known
    batch_size: int | None = None  # of one process; None: it varies
    stream: "StreamPosition | None" = None  # where an iterable data set of training is
    limit: int | None = None  # micro-batches that are used of an epoch; None: all
    rows_vary: bool = False  # whether a batch may have other rows than samples were asked for
    parts: "Mapping[str, PreparedLoader] | None" = None  # that it is combined of, by name

    def __init__(self, source: Any, context: LoaderContext) -> None:
        self.source = source
        self.processes = context.processes
        self._transfer = transfer_for(context.device, source, moves=context.moves)
        self.active = context.active
        self._trains = context.trains
        self._refuses_empty = context.trains and not context.may_be_empty
        self._next_epoch = 0
        self._known_length: EpochLength | None = None  # until somebody has asked for it

    @abstractmethod
    def windows(
        self, epoch: int, *, position: int = 0, accumulation: int = 1, drop_last: bool = False
    ) -> Generator[Window, None, None]:
        """Yield the windows of an epoch, for training.

        Args:
            epoch: Which epoch, from 0.
            position: Samples of the epoch that were consumed before, over all processes.
            accumulation: Micro-batches in a full window.
            drop_last: Whether a last window that is smaller than the others is left out.

        Raises:
            DataError: No micro-batch starts at `position`, or the epoch has no window at all.
        """

    @abstractmethod
    def batches(self, epoch: int, *, position: int = 0) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches of an epoch; arguments and errors as for `windows`."""

    def limit_to(self, batches: int | float | None) -> None:
        """Use only so many micro-batches of each epoch, the first; a float is a fraction of them.

        Raises:
            ConfigError: The fraction comes to nothing, or to what is not known.
        """
        known = self.batches_per_epoch
        if isinstance(batches, float) and batches < 1:
            fraction, batches = batches, int((known or 0) * batches + 1e-9)
            if not batches:
                total = "an unknown number of" if known is None else known
                raise ConfigError(
                    f"The loader, a `{type(self.source).__name__}`, gives each process {total} "
                    f"batches, so a limit of {fraction} of them is none. Give a whole number."
                )
        if batches is None or isinstance(batches, float):
            return
        self.limit = batches
        self.batches_per_epoch = batches if known is None else min(known, batches)
        if self.samples_per_epoch is not None:
            most = self.nominal_window(batches) or 0  # never: where one is known the other is
            self.samples_per_epoch = min(self.samples_per_epoch, most)

    def newly_known_length(self) -> EpochLength | None:
        """Return the length of an epoch once: when it is known, which of a stream is at its end."""
        length, self._known_length = self._known_length, None
        return length

    def combination(self, accumulation: int) -> str | None:
        """Return how several loaders make its windows, alike for any split; None of one loader."""
        return None

    def order_facts(self) -> dict[str, Any]:
        """Return what is known of how the samples are ordered, by names for people."""
        from trainkit.data.order_facts import order_facts  # only checkpoints need it

        return order_facts(self.source)

    def order_digest(self, epoch: int, accumulation: int) -> str | None:
        """Return what tells the order of an epoch from others; None where it is not known.

        It is the same for every number of processes and accumulation with the same windows. The
        sampler runs if it has not for this epoch; then the next pass of the epoch uses the same.
        """
        return None

    def forget_order(self) -> None:
        """Let the sampler run again, where `order_digest` came before it was ready."""
        return

    def keep_order(self) -> None:
        """Let the next pass of the epoch that was read last use its order, not make it anew."""
        return

    @abstractmethod
    def close(self) -> None:
        """Stop the workers; a later pass starts them again."""

    def _refuse_empty(self, samples: int | None) -> None:
        """Raise ConfigError where training would have no step, of data with `samples` samples."""
        if not self._refuses_empty or self.batches_per_epoch != 0:
            return
        if samples:
            raise ConfigError(
                f"0 training steps per epoch: {samples} samples, batch {self.batch_size} x "
                f"{self.processes.size} processes, drop_last=True. Use a smaller batch size, or "
                "`drop_last=False`."
            )
        data = getattr(self.source, "dataset", self.source)
        raise ConfigError(
            f"The training data, a `{type(data).__name__}`, is empty. Give a data set, sampler or "
            "list with at least one sample."
        )

    def _refuse_idle(self, epoch: int) -> None:
        """Raise DataError for an epoch that turned out to have no window."""
        if not self._refuses_empty:
            return
        # Going on would look for the next step in empty epochs for ever.
        raise DataError(
            f"Epoch {epoch} of the training loader, a `{type(self.source).__name__}`, has no step: "
            "the data is empty, or used up, or `drop_last` leaves nothing of it."
        )

    def nominal_window(self, accumulation: int) -> int | None:
        """Return the samples of a full window over all processes; None where they vary."""
        if self.batch_size is None:
            return None
        return accumulation * self.processes.size * self.batch_size

    def steps_per_epoch(self, accumulation: int, drop_last: bool) -> int | None:
        """Return the number of windows in an epoch; None where it is not known ahead."""
        if self.batches_per_epoch is None:
            return None
        if not drop_last:
            return -(-self.batches_per_epoch // accumulation)
        nominal = self.nominal_window(accumulation)
        if nominal is None or self.samples_per_epoch is None:
            return self.batches_per_epoch // accumulation
        return self.samples_per_epoch // nominal

    def __iter__(self) -> Iterator[Any]:
        """Yield the data of an epoch's micro-batches, for loops of the user's own."""
        epoch = self._next_epoch
        self._next_epoch += self._trains
        for micro_batch in self.batches(epoch):
            yield micro_batch.data

    def __len__(self) -> int:
        """Return the number of micro-batches of one process; TypeError where it is not known."""
        if self.batches_per_epoch is None:
            raise TypeError(f"The length of this `{type(self).__name__}` is not known ahead.")
        return self.batches_per_epoch
