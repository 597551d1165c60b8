"""What a run is made of: counters, requests, seconds, checkpoints, internals, and its result."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit.basics import rng
from trainkit.basics.signals import Interrupts
from trainkit.distributed import AsyncFlags, Processes
from trainkit.distributed.collectives import first_with
from trainkit.errors import ConfigError
from trainkit.training.evaluation_weights import EvaluationWeights

if TYPE_CHECKING:
    from trainkit.basics.lock import RunLock
    from trainkit.checkpoint.saver import Saver
    from trainkit.data import Window
    from trainkit.training.resume.attributes import Attributes
    from trainkit.types import Scalars, Stateful


@dataclass(kw_only=True, slots=True)
class TrainState:
    """How far a training is (rules 1, 2)."""

    step: int = 0
    """Updates applied."""
    skipped_steps: int = 0
    """Windows that ended without an update."""
    consecutive_skips: int = 0
    """Skipped windows since the last update."""
    epoch: int = 0
    """Epochs completed; the number of the current one, counted from 0."""
    epoch_samples: int = 0
    """Samples consumed in the current epoch, all processes together: the data position."""
    samples_seen: int = 0
    """Samples consumed since the start, all processes together, repeats excluded."""

    @property
    def attempts(self) -> int:
        """Windows that were completed, applied or skipped."""
        return self.step + self.skipped_steps

    def state_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take the counters back; the names must be exactly those of `state_dict`."""
        names = {field.name for field in fields(self)}
        if set(state) != names:
            raise ConfigError(
                f"`state` must have exactly the keys {sorted(names)}, but has {sorted(state)}."
            )
        for name in names:
            setattr(self, name, state[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """What a training came to."""

    step: int
    """Updates applied."""
    skipped_steps: int
    """Windows that ended without an update."""
    epoch: int
    """Epochs completed."""
    samples_seen: int
    """Samples consumed, all processes together, repeats excluded."""
    metrics: Scalars
    """Metrics of the last evaluation."""
    best_metrics: Scalars
    """Best value of each metric of which it is known, or `keep_best` says, what is better."""
    stop_reason: str
    """"max_epochs", "max_steps", or the reason that `request_stop` was given."""
    output_dir: Path | None
    """Where the files are."""
    checkpoint: Path | None = None
    """The last checkpoint that was committed, from which the run can be resumed."""
    best_checkpoint: Path | None = None
    """The best one, by `Checkpoint(keep_best=...)`; it may hold weights alone."""
    best_step: int | None = None
    """The step of it."""
    best_value: float | None = None
    """What its evaluation gave for the metric of `keep_best`."""


@dataclass(slots=True)
class StepRequests:
    """What the end of a step is to serve."""

    stop: str | None = None
    evaluation: bool = False
    checkpoint: bool = False


@dataclass(slots=True)
class Requests(StepRequests):
    """What all processes know was asked of a run, and was not yet served."""

    skip: str | None = None
    signal: int = 0  # the signal that ends the run, once all know of it
    own: StepRequests = field(default_factory=StepRequests)  # to be agreed by all
    _sent_stop: str | None = None  # in the exchange under way

    def send(self, flags: AsyncFlags, signum: int) -> None:
        """Tell the others what this process alone knows or asked for (rule 34)."""
        own, self.own = self.own, StepRequests()  # a signal handler may ask at any moment
        flags.exchange((own.stop is not None, own.evaluation, own.checkpoint, signum))
        self._sent_stop = own.stop

    def read(self, flags: AsyncFlags, processes: Processes) -> None:
        """Take over what the processes have told each other since the last call."""
        told = flags.result()
        if told is None:
            return
        stop, evaluation, checkpoint, signum = told
        self.signal = self.signal or signum
        self.checkpoint |= bool(checkpoint)
        self.evaluation |= bool(evaluation)
        if stop and self.stop is None:
            first = first_with(processes, self._sent_stop is not None)
            self.stop = processes.broadcast_object(self._sent_stop, first or 0)


@dataclass(slots=True)
class PhaseClock:
    """What a run is doing, and the seconds that each kind of it has taken so far."""

    phase: str = "setup"
    _since: float = field(default_factory=time.monotonic)
    _spent: Scalars = field(default_factory=dict)

    def enter(self, phase: str) -> str:
        """Count the time until now for the present phase, which is returned, and begin another."""
        present = self.phase
        self._spent, self.phase, self._since = self.seconds(), phase, time.monotonic()
        return present

    def seconds(self) -> Scalars:
        """Return the seconds by phase, those of the present one too."""
        spent = time.monotonic() - self._since
        return self._spent | {self.phase: self._spent.get(self.phase, 0.0) + spent}


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What a model was before its training, as far as that does not change it, by digests."""

    whole: Mapping[str, str]  # of each frozen parameter, alike for every strategy and device
    local: Mapping[str, str]  # of what lies on this process


@dataclass(kw_only=True, slots=True)
class RunCheckpoints:
    """What a run saves, and what it went on from."""

    saver: Saver | None = None  # None where nothing is to be saved
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # that of process 0 counts
    resumed_from: int | None = None
    """The step of the checkpoint that this fit went on from: what is in the folder is its own."""
    saved_attempt: int = -1  # `TrainState.attempts` when the run was saved last
    base: Base | None = None  # what checkpoints refer to, instead of holding it
    restore_best: bool = False  # whether the fit is to leave the best weights in the model
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    """What the user registered for checkpointing, by name."""


_fits = count(1)


@dataclass(kw_only=True, slots=True)
class Internals:
    """What trainkit keeps of a run for itself; no callback of a user's has a use for it."""

    weights: EvaluationWeights
    flags: AsyncFlags | None
    """What the processes tell each other by every 0.25 s or so; None on one process."""
    given_groups: int  # those of the optimizer before the run added any
    scheduled_steps: int | None
    """What `planned_steps` was when the schedule was made: epochs may turn out otherwise."""
    number: int = field(default_factory=lambda: next(_fits))
    """Which `fit` of this process it is, from 1 on."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    mirror: Any = None
    """What mirrors the output directory to a storage, on the main process."""
    courier: Any = None
    """What brings the main process the files of those that do not see the output directory."""
    scratch: Path | None = None
    """Where a dry run writes; the folder is gone when the program ends."""
    outputs: dict[Path, str] = field(default_factory=dict)
    """Which logger writes which file or folder, on the main process."""
    locks: list[RunLock] = field(default_factory=list)
    """What keeps other programs away, on the main process; that of the output directory first."""
    streams: Mapping[str, Any] | None = None
    """Where its random streams are, while the global generators are not the run's: a resume begins
    with them, and after the end a save holds them."""
    attributes: Attributes
    """What changes in modules, loss and data sets, and no `state_dict` holds."""
    given_names: set[str] | None = None  # of parameters before the first step, until told
    left_out: set[str] = field(default_factory=set)  # trainable, in no optimizer: nothing to say
    check_order: Callable[[], None] | None = None  # once, before the first window of a resume
    recut: Callable[[Generator[Window, None, None]], Generator[Window, None, None]] | None = None
    """Cuts the windows of an epoch into other micro-batches of the same samples; None: as read."""

    def restore_streams(self, device: torch.device) -> None:
        """Put the random streams of a checkpoint back: the last thing before the first step."""
        streams, self.streams = self.streams, None
        if streams is not None:
            rng.load_state_dict(streams, device)
