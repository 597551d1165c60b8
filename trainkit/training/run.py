"""A training as callbacks see it; `run_parts.py` has what it is made of."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics import rng
from trainkit.distributed import AsyncFlags, collective_guard
from trainkit.errors import ConfigError, quoted
from trainkit.training.evaluation_weights import EvaluationWeights
from trainkit.training.logging import RunServices
from trainkit.training.run_parts import (
    Internals,
    PhaseClock,
    Requests,
    RunCheckpoints,
    StepRequests,
    TrainState,
)

if TYPE_CHECKING:
    from trainkit.basics.config import TrainConfig
    from trainkit.checkpoint.retention import Best, Retention
    from trainkit.checkpoint.saver import NonFinite
    from trainkit.data import PreparedLoader, Window
    from trainkit.precision import Precision
    from trainkit.strategies import Strategy
    from trainkit.training.evaluation import RunEvaluation
    from trainkit.training.lr_schedule import LRSchedule, LRSchedules
    from trainkit.training.objectives import Objectives
    from trainkit.training.several.objectives import NamedObjective, Weight
    from trainkit.types import Batch, Scalars, StepOutput


@dataclass(kw_only=True, slots=True)
class Run(RunServices):
    """One training. Callbacks read it, and ask it by `log` and `request_...`.

    What a callback may use:

    - where the training stands: `state`, `phase`, `planned_steps`, `is_log_step`, `is_evaluated`,
      `end_reached`, `stop_reason`
    - what is trained, and how: `module`, `model`, `parameters`, `optimizer`, `optimizers`,
      `lr_schedule`, `strategy.device`, `evaluation.loaders`, `config`, `hparams`
    - what came of it: `metrics`, `best_metrics`, `checkpoint`, `checkpoints.resumed_from`,
      `output_dir`
    - to say something: `log`, `print`; to ask for something: `request_stop`, `request_skip`,
      `request_evaluation`, `request_checkpoint`; in a step: `optimize`, `zero_weight`
    - to read the weights that are evaluated: `evaluation_weights`
    - the other processes: `processes`, `is_main_process`, `gather`, `gather_for_metrics`,
      `own_rows`

    The rest, and all behind `internals`, serves what comes with trainkit: it may change any time.
    """

    state: TrainState = field(default_factory=TrainState)
    """Counters: equal on all processes, and in every checkpoint."""
    planned_steps: int | None
    """Steps to the end of the training; None where that is not known."""
    config: TrainConfig
    """The settings of the `Trainer`."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """What the user says of the run, in plain values."""
    module: nn.Module
    """The user's own model; `model` is the same as the strategy has wrapped it."""
    optimizer: Optimizer
    """The optimizer; of several all of them as one, see `optimizers`."""
    lr_schedule: LRSchedule | LRSchedules | None
    strategy: Strategy
    precision: Precision
    metrics: Scalars = field(default_factory=dict)
    """Metrics of the latest evaluation."""
    best_metrics: Scalars = field(default_factory=dict)
    """Best value so far of each metric of which it is known what is better."""
    output_dir: Path | None = None
    checkpoint: Path | None = None
    """The last checkpoint that was committed, or resumed from."""
    stop_reason: str | None = None
    """Why the training ended; None while it goes on."""

    training_step: Callable[[nn.Module, Batch], Any]
    train_loader: PreparedLoader
    objectives: Objectives
    evaluation: RunEvaluation
    checkpoints: RunCheckpoints = field(default_factory=RunCheckpoints)
    clock: PhaseClock = field(default_factory=PhaseClock)
    """Seconds of this process by what the run was doing."""
    requests: Requests = field(default_factory=Requests)
    internals: Internals = field(init=False)

    def __post_init__(self) -> None:
        from trainkit.training.resume.attributes import attributes_of  # only a fit needs it

        processes, evaluator = self.strategy.processes, self.evaluation.evaluator
        trainer = getattr(evaluator.step, "__self__", None)
        schedules = self.lr_schedule.each(None) if self.lr_schedule is not None else ()
        self.internals = Internals(
            weights=EvaluationWeights(self.optimizer),
            flags=AsyncFlags(processes, size=4) if processes.size > 1 else None,
            given_groups=len(self.optimizer.param_groups),
            scheduled_steps=self.planned_steps,
            attributes=attributes_of(
                self.module,
                evaluator.loss_fn,
                self.train_loader,
                trainer,
                [
                    *self.checkpoints.objects.values(),
                    *(self.model, self.optimizer),
                    *getattr(self.optimizer, "parts", {"": self.optimizer}).values(),
                    *(schedule.scheduler for _, schedule, _ in schedules),
                    *self.strategy.engines,
                ],
                self.print,
            ),
        )

    @property
    def phase(self) -> str:
        """What the run is doing: setup, train, evaluate, save, end, done."""
        return self.clock.phase

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

    @property
    def is_log_step(self) -> bool:
        """Whether `on_log` comes after this step; ask in `on_step_end`."""
        return self.state.step % self.config.log_every_n_steps == 0

    @property
    def is_evaluated(self) -> bool:
        """Whether the latest evaluation is that of the present weights."""
        return self.evaluation.evaluated_attempt == self.state.attempts

    @property
    def end_reached(self) -> str | None:
        """Which limit is reached, if any; that of steps also ends `train_epoch`, in the loop."""
        config, state = self.config, self.state
        if config.max_steps is not None and state.step >= config.max_steps:
            return "max_steps"
        if config.dry_run is not None and state.epoch:
            return "dry_run"
        is_last = config.max_epochs is not None and state.epoch >= config.max_epochs
        return "max_epochs" if is_last else None

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

    def request_skip(self, reason: str) -> None:
        """Ask, inside `on_gradients`, that this window's update is not applied.

        The decision must come from a value that is equal on all processes.
        """
        collective_guard.check("request_skip")
        self.requests.skip = reason

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

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the model hold the weights to be evaluated inside, and those of training after it.

        They are others only with optimizers that have `train()` and `eval()`, such as those of
        `schedulefree`. After `fit` the model holds them anyway. Every process must enter it.
        """
        return self.internals.weights.held()

    # For callbacks that come with trainkit and write, save or train by themselves.

    def place(self, path: Path) -> Path:
        """Return where to write what belongs at an absolute path: in a dry run not there."""
        scratch = self.internals.scratch
        return path if scratch is None else scratch.joinpath(*path.parts[1:])

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
            # Of another start of it, or of this one when it has ended and is saved once more.
            goes_on=checkpoints.resumed_from is not None or self.phase == "done",
            background=background,
            non_finite=non_finite,
            keep_best=keep_best,
        )
        checkpoints.saver.weights_only = weights_only
        checkpoints.saver.courier = self.internals.courier
        self.evaluation.keep_best = None if keep_best is None else keep_best[:2]
        if self.internals.locks:
            checkpoints.saver.check_folder = self.internals.locks[0].check
        if self.internals.mirror is not None:
            checkpoints.saver.committed = self.internals.mirror.committed

    def windows(self) -> Generator[Window, None, None]:
        """Return the windows of what is left of the current epoch."""
        check, self.internals.check_order = self.internals.check_order, None
        if check is not None:
            check()
        self.internals.attributes.begin_pass(goes_on=self.state.epoch_samples > 0)
        windows = self.train_loader.windows(
            self.data_epoch(self.state.epoch),
            position=self.state.epoch_samples,
            accumulation=self.config.gradient_accumulation_steps,
            drop_last=self.config.drop_last_window,
        )
        windows = windows if self.internals.recut is None else self.internals.recut(windows)
        return windows if self.config.dry_run is None else _first(windows, self.config.dry_run)

    def data_epoch(self, epoch: int) -> int:
        """Return which epoch's samples an epoch has: with `overfit_batches` those of the first."""
        return epoch if self.config.overfit_batches is None else 0

    @contextmanager
    def as_zero_weight(self, *, gathers: bool = False) -> Iterator[None]:
        """Run a micro-batch that counts for nothing: buffers and random streams are put back.

        With `gathers` its rows are gathered all the same, as where no process has others.
        """
        from trainkit.training.unchanged import kept_buffers  # most windows have none

        processes = self.strategy.data_processes
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

    def _asked(self, call: str, agreed: bool) -> StepRequests:
        """Return where a request goes: to all at once, or to what this process has to tell."""
        if agreed:
            collective_guard.check(f"{call}(agreed=True)")
        return self.requests if agreed or self.internals.flags is None else self.requests.own


def _first(windows: Generator[Window, None, None], limit: int) -> Generator[Window, None, None]:
    with closing(windows):
        yield from islice(windows, limit)
