"""The parts of one training and the requests made of it: what callbacks see."""

from __future__ import annotations

import signal
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics import rng
from trainkit.basics.signals import Interrupted, Interrupts, is_interactive
from trainkit.distributed import AsyncFlags, Processes, collective_guard
from trainkit.distributed.collectives import first_with
from trainkit.errors import ConfigError, quoted
from trainkit.training.evaluation_weights import EvaluationWeights
from trainkit.training.logging import RunServices
from trainkit.training.state import TrainState

if TYPE_CHECKING:
    from trainkit.basics.config import TrainConfig
    from trainkit.basics.lock import RunLock
    from trainkit.checkpoint.retention import Best, Retention
    from trainkit.checkpoint.saver import NonFinite, Saver
    from trainkit.data import PreparedLoader, Window
    from trainkit.precision import Precision
    from trainkit.strategies import Strategy
    from trainkit.training.evaluation import RunEvaluation
    from trainkit.training.lr_schedule import LRSchedule, LRSchedules
    from trainkit.training.objectives import Objectives
    from trainkit.training.several.objectives import NamedObjective, Weight
    from trainkit.types import Batch, Scalars, Stateful, StepOutput


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

    def enter(self, phase: str) -> None:
        """Count the time until now for the present phase, and begin another."""
        self._spent, self.phase, self._since = self.seconds(), phase, time.monotonic()

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


_fits = count(1)


@dataclass(kw_only=True, slots=True)
class Run(RunServices):
    """The parts of one training. Callbacks read it, and ask it by `log` and `request_...`."""

    config: TrainConfig
    strategy: Strategy
    precision: Precision
    module: nn.Module  # the user's own
    optimizer: Optimizer
    lr_schedule: LRSchedule | LRSchedules | None
    train_loader: PreparedLoader
    training_step: Callable[[nn.Module, Batch], Any]
    objectives: Objectives
    planned_steps: int | None
    evaluation: RunEvaluation
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)
    output_dir: Path | None = None
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """What the user says of the run, in plain values."""
    outputs: dict[Path, str] = field(default_factory=dict)
    """Which logger writes which file or folder, on the main process."""
    locks: list[RunLock] = field(default_factory=list)
    """What keeps other programs away, on the main process; that of the output directory first."""
    scratch: Path | None = None
    """Where a dry run writes; the folder is gone when the program ends."""
    state: TrainState = field(default_factory=TrainState)
    metrics: Scalars = field(default_factory=dict)
    """Metrics of the latest evaluation."""
    best_metrics: Scalars = field(default_factory=dict)
    """Best value so far of each metric of which it is known what is better."""
    checkpoint: Path | None = None
    """The last checkpoint that was committed, or resumed from."""
    stop_reason: str | None = None
    """Why the training ended; None while it goes on."""
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Seconds of this process by what the run was doing."""
    requests: Requests = field(default_factory=Requests)
    objects: Mapping[str, Stateful] = field(default_factory=dict)
    """What the user registered for checkpointing, by name."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    streams: Mapping[str, Any] | None = None
    """Where its random streams are, while the global generators are not the run's: a resume begins
    with them, and after the end a save holds them."""
    number: int = field(default_factory=lambda: next(_fits))
    """Which `fit` of this process it is, from 1 on."""
    left_out: set[str] = field(default_factory=set)  # trainable, in no optimizer: nothing to say
    check_order: Callable[[], None] | None = None  # once, before the first window of a resume
    recut: Callable[[Generator[Window, None, None]], Generator[Window, None, None]] | None = None
    """Cuts the windows of an epoch into other micro-batches of the same samples; None: as read."""

    weights: EvaluationWeights = field(init=False)
    flags: AsyncFlags | None = field(init=False)
    """What the processes tell each other by every 0.25 s or so; None on one process."""
    given_groups: int = field(init=False)  # those of the optimizer before the run added any
    scheduled_steps: int | None = field(init=False)
    """What `planned_steps` was when the schedule was made: epochs may turn out otherwise."""

    def __post_init__(self) -> None:
        self.weights = EvaluationWeights(self.optimizer)
        processes = self.strategy.processes
        self.flags = AsyncFlags(processes, size=4) if processes.size > 1 else None
        self.given_groups = len(self.optimizer.param_groups)
        self.scheduled_steps = self.planned_steps

    @property
    def phase(self) -> str:
        """What the run is doing: setup, train, evaluate, save, end, done."""
        return self.clock.phase

    def enter(self, phase: str) -> str:
        """Note that another phase begins, and return the present one; `clock` counts seconds."""
        present = self.clock.phase
        self.clock.enter(phase)
        return present

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def model(self) -> nn.Module:
        """What the training step gets: the module as the strategy has wrapped it."""
        return self.objectives.model

    @property
    def optimizers(self) -> Mapping[str, NamedObjective]:
        """Several optimizers by name, with the updates of each; empty where there is one."""
        return self.objectives.by_name

    def optimize(
        self,
        name: str,
        loss: Tensor | Mapping[str, Tensor | StepOutput],
        weight: Weight = None,
        loader: str = "",
    ) -> None:
        """Give a loss to one of several optimizers; for a `training_step` that returns none.

        The gradients come when the step has returned, and reach the parameters of this optimizer
        alone; the update when the window is complete. Losses that one optimizer is given in a
        micro-batch are added.

        Args:
            name: The optimizer's. All micro-batches of a window, on all processes, give losses to
                the same ones; another window may do so to others.
            loss: Scalar with a graph: a mean over the items of the micro-batch. Several terms, each
                with its weight: a mapping, as a step may return it.
            weight: As that of a `StepOutput`.
            loader: Of several training loaders the one whose samples the loss is a mean over, by
                its name in the batch. Left out, the loss counts by the samples of all of them.

        Raises:
            ConfigError: There is one optimizer, none of this name, or `loss` cannot be used.
        """
        loaders = self.train_loader.parts
        if loader and loader not in (loaders or ()):
            are = f"the training loaders are {quoted([*loaders])}" if loaders else "there is one"
            raise ConfigError(
                f"`run.optimize` was given the loader {loader!r}, but {are}. Of several, pass the "
                "one whose samples the loss is a mean over, by its name in the batch."
            )
        self.objectives.optimize(name, loss, weight, loader or "")

    def windows(self) -> Generator[Window, None, None]:
        """Return the windows of what is left of the current epoch."""
        check, self.check_order = self.check_order, None
        if check is not None:
            check()
        windows = self.train_loader.windows(
            self.data_epoch(self.state.epoch),
            position=self.state.epoch_samples,
            accumulation=self.config.gradient_accumulation_steps,
            drop_last=self.config.drop_last_window,
        )
        windows = windows if self.recut is None else self.recut(windows)
        return windows if self.config.dry_run is None else _first(windows, self.config.dry_run)

    def data_epoch(self, epoch: int) -> int:
        """Return which epoch's samples an epoch has: with `overfit_batches` those of the first."""
        return epoch if self.config.overfit_batches is None else 0

    @property
    def end_reached(self) -> str | None:
        """Which limit of the configuration is reached, if any."""
        config, state = self.config, self.state
        if config.max_steps is not None and state.step >= config.max_steps:
            return "max_steps"
        if config.dry_run is not None and state.epoch:
            return "dry_run"
        is_last = config.max_epochs is not None and state.epoch >= config.max_epochs
        return "max_epochs" if is_last else None

    @property
    def is_log_step(self) -> bool:
        """Whether `on_log` comes after this step; ask in `on_step_end`."""
        return self.state.step % self.config.log_every_n_steps == 0

    @property
    def is_evaluated(self) -> bool:
        """Whether the latest evaluation is that of the present weights."""
        return self.evaluation.evaluated_attempt == self.state.attempts

    @property
    def lacks_last_evaluation(self) -> bool:
        """Whether the last step is to be evaluated and has not been."""
        return self.evaluation.at_end and not self.is_evaluated

    def request_stop(self, reason: str, *, agreed: bool = False) -> None:
        """Ask for the end of training.

        Args:
            reason: Stands in `FitResult.stop_reason`.
            agreed: True where every process asks the same at the same hook, as after a decision
                from reduced metrics: acts at once. Else the processes agree, and all stop at the
                end of the same window, at most 0.25 s or so and one window later.
        """
        asked = self._asked("request_stop", agreed)
        asked.stop = asked.stop or reason

    def request_evaluation(self, *, agreed: bool = False) -> None:
        """Ask for an evaluation after this step; `agreed` as in `request_stop`."""
        self._asked("request_evaluation", agreed).evaluation = True

    def request_checkpoint(self, *, agreed: bool = False) -> None:
        """Ask for a checkpoint after this step; `agreed` as in `request_stop`."""
        if self.checkpoints.saver is None:
            raise ConfigError(
                "A checkpoint was requested, but nothing says where and which to keep. Add the "
                "callback `Checkpoint(...)`."
            )
        self._asked("request_checkpoint", agreed).checkpoint = True

    def _asked(self, call: str, agreed: bool) -> StepRequests:
        """Return where a request goes: to all at once, or to what this process has to tell."""
        if agreed:
            collective_guard.check(f"{call}(agreed=True)")
        return self.requests if agreed or self.flags is None else self.requests.own

    def save_checkpoints(
        self,
        retention: Retention,
        *,
        background: bool = False,
        non_finite: NonFinite = "mark",
        keep_best: Best | None = None,
        weights_only: bool = False,
    ) -> None:
        """Make this run one that saves checkpoints.

        Every process must call it, in `on_fit_start`; see `Checkpoint` for the arguments.
        """
        if self.checkpoints.saver is not None or self.output_dir is None:
            raise ConfigError(
                "A run saves checkpoints under its `output_dir`, by one `Checkpoint` callback. "
                "Leave one out, or pass `Trainer(output_dir=...)`."
            )
        from trainkit.checkpoint.saver import Saver  # runs without checkpoints need none of it

        processes, checkpoints = self.strategy.processes, self.checkpoints
        checkpoints.run_id = processes.broadcast_object(checkpoints.run_id or uuid.uuid4().hex)
        checkpoints.saver = Saver(
            self.output_dir,
            processes,
            retention,
            run_id=checkpoints.run_id,
            resumed_from=checkpoints.resumed_from,
            background=background,
            non_finite=non_finite,
            keep_best=keep_best,
        )
        checkpoints.saver.weights_only = weights_only
        self.evaluation.keep_best = None if keep_best is None else keep_best[:2]
        if self.locks:
            checkpoints.saver.check_folder = self.locks[0].check

    def request_skip(self, reason: str) -> None:
        """Ask, inside `on_gradients`, that this window's update is not applied.

        The decision must come from a value that is equal on all processes.
        """
        collective_guard.check("request_skip")
        self.requests.skip = reason

    def place(self, path: Path) -> Path:
        """Return where to write what belongs at an absolute path: in a dry run not there."""
        return path if self.scratch is None else self.scratch.joinpath(*path.parts[1:])

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the model hold the weights to be evaluated inside, and those of training after it.

        They are others only with optimizers that have `train()` and `eval()`, such as those of
        `schedulefree`. After `fit` the model holds them anyway. Every process must enter it.
        """
        return self.weights.held()

    def close(self) -> None:
        """Give back the strategy's wrapper; a second fit makes its own."""
        self.streams = rng.state_dict(self.strategy.device)
        if self.checkpoints.saver is not None:
            self.checkpoints.saver.close()
        self.objectives.close()
        self.enter("done")

    def interruption(self) -> Interrupted | None:
        """Say what a signal has ended, and return what ends the program.

        None: somebody goes on typing, as in a notebook, and has only asked the training to end.
        """
        signum = self.requests.signal
        goes_on = signum == signal.SIGINT and is_interactive()
        saved = f"checkpoint `{self.checkpoint}`" if self.checkpoints.saver else "nothing saved"
        message = (
            f"trainkit: ended by {signal.Signals(signum).name} at step {self.state.step}, {saved}."
            + (" The model holds the weights of this step." if goes_on else "")
        )
        if sys.stderr is not None:
            self.print(message, file=sys.stderr)
        return None if goes_on else Interrupted(signum, message)

    def result(self) -> FitResult:
        """Return what the training came to."""
        return FitResult(
            step=self.state.step,
            skipped_steps=self.state.skipped_steps,
            epoch=self.state.epoch,
            samples_seen=self.state.samples_seen,
            metrics=dict(self.metrics),
            best_metrics=dict(self.best_metrics),
            stop_reason=self.stop_reason or "",
            output_dir=self.output_dir,
            checkpoint=self.checkpoint,
        )

    def restore_streams(self) -> None:
        """Put the random streams of a checkpoint back: the last thing before the first step."""
        streams, self.streams = self.streams, None
        if streams is not None:
            rng.load_state_dict(streams, self.strategy.device)

    def check_overflow(self, loss: Tensor, precision: Precision) -> str:
        """Return why a window is skipped; raise where its overflow leaves no way on."""
        if precision.exhausted:
            from trainkit.training.overflow import low_scale  # most runs need none of it

            named = self.module.named_parameters()
            raise low_scale(self.strategy, named, loss, step=self.state.step)
        return "the gradients overflowed"

    @contextmanager
    def as_zero_weight(self, *, gathers: bool = False) -> Iterator[None]:
        """Run a micro-batch that counts for nothing: buffers and random streams are put back.

        With `gathers` its rows are gathered all the same, as where no process has others.
        """
        from trainkit.training.unchanged import kept_buffers  # most windows have none

        processes = self.strategy.processes
        self.logging.zero_weight, processes.repeats = True, not gathers
        try:
            with (
                kept_buffers(self.module.modules()),
                rng.preserved(self.strategy.device),
                self.strategy.zero_gradients(self.module),
            ):
                yield
        finally:
            self.logging.zero_weight = processes.repeats = False


def _first(windows: Generator[Window, None, None], most: int) -> Generator[Window, None, None]:
    with closing(windows):
        yield from islice(windows, most)
