"""Learning-rate schedules: when they advance, those by name, and optimizers that need none."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from trainkit.basics.config import check_argument
from trainkit.errors import ConfigError
from trainkit.training.evaluation import RunEvaluation
from trainkit.training.run_parts import TrainState
from trainkit.types import AnyScheduler, Scalars, SchedulerFactory

if TYPE_CHECKING:
    from trainkit.training.objectives import Objectives

NAMES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """A scheduler and when it advances: once per applied step unless said otherwise.

    Args:
        scheduler: The scheduler. `ReduceLROnPlateau` needs `metric`.
        every: "step": after each applied update. "epoch": at the end of each epoch.
        metric: A metric such as "eval/loss"; the scheduler then advances after each evaluation
            and is given its value.
        unit_is_assumed: Set for a scheduler that was given without an `LRSchedule`.
    """

    scheduler: AnyScheduler
    every: Literal["step", "epoch"] = "step"
    metric: str | None = None
    unit_is_assumed: bool = field(default=False, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        if self.every not in ("step", "epoch"):
            raise ConfigError(f'`every` must be "step" or "epoch", but is {self.every!r}.')
        if not hasattr(self.scheduler, "optimizer"):
            raise ConfigError(
                "`LRSchedule` takes a scheduler that is made, but was given a "
                f"{type(self.scheduler).__name__!r}. Make it with the optimizer: "
                "`lr_scheduler=lambda optimizer: LRSchedule(make(optimizer), ...)`."
            )
        try:
            if self.metric is None:
                signature(self.scheduler.step).bind()
        except TypeError:
            raise ConfigError(
                f"`{self.kind}.step` needs an argument. For a metric return `LRSchedule(scheduler, "
                'metric="eval/loss")`; for the epoch, call it in `on_epoch_end` of a callback.'
            ) from None

    @property
    def kind(self) -> str:
        """What it is: its class, or its name and warm-up."""
        return str(getattr(self.scheduler, "described", type(self.scheduler).__name__))

    @property
    def unit(self) -> str:
        """When it advances."""
        return f"every {self.every}" if self.metric is None else f"by {self.metric}"

    @property
    def name(self) -> str:
        """What it is, and when it advances if not after each update."""
        return self.kind if self.unit == "every step" else f"{self.kind} {self.unit}"

    def watch(self, evaluation: RunEvaluation) -> None:
        """Let it be said where the schedule could never advance, or goes by the wrong end."""
        if self.metric is not None:
            scheduler = self.scheduler
            mode = scheduler.mode if isinstance(scheduler, ReduceLROnPlateau) else None
            evaluation.watch("`LRSchedule` watches", self.metric, mode)

    def catch_up(self, state: TrainState) -> None:
        """Bring a schedule that was made for a new horizon to where the training is."""
        if self.metric is not None:
            return
        with _without_update():
            for _ in range(state.step if self.every == "step" else state.epoch):
                self.scheduler.step()  # type: ignore[call-arg]

    def advance(self, unit: Literal["step", "epoch"], of: str = "") -> None:
        """Advance after an applied update or at the end of an epoch, if that is its pace.

        Args:
            unit: What has ended.
            of: Which of several optimizers it was for; "" for all.
        """
        if self.metric is not None or self.every != unit:
            return
        if unit == "step":
            self.scheduler.step()  # type: ignore[call-arg]
            return
        with _without_update():  # all windows of an epoch may have been skipped
            self.scheduler.step()  # type: ignore[call-arg]

    def advance_evaluation(self, metrics: Scalars) -> None:
        """Advance after an evaluation, if this schedule watches one of its metrics."""
        if self.metric is not None:
            self.scheduler.step(metrics[self.metric])  # type: ignore[arg-type]

    def each(self, steps: int | None) -> Iterator[tuple[str, "LRSchedule", int | None]]:
        """Yield name, schedule and updates of each optimizer that has one, of `steps` windows."""
        yield "", self, steps


@contextmanager
def _without_update() -> Iterator[None]:
    """Keep torch from warning that the optimizer it knows has made no update before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        yield


@dataclass(frozen=True, slots=True)
class LRSchedules:
    """The schedules of several optimizers, by their names; all advance as one."""

    by_name: Mapping[str, LRSchedule]
    objectives: "Objectives"

    @property
    def every(self) -> str:
        """ "step" where any of them advances after updates."""
        return "step" if any(each.every == "step" for each in self.by_name.values()) else "epoch"

    @property
    def kind(self) -> str:
        """What each is."""
        return ", ".join(f"{name}: {each.kind}" for name, each in self.by_name.items())

    @property
    def unit(self) -> str:
        """When each advances."""
        return ", ".join(f"{name}: {each.unit}" for name, each in self.by_name.items())

    @property
    def name(self) -> str:
        """What each is, and when it advances if not after each update."""
        return ", ".join(f"{name}: {each.name}" for name, each in self.by_name.items())

    @property
    def scheduler(self) -> "_Schedulers":
        """The schedulers, as one that can be saved."""
        return _Schedulers({name: each.scheduler for name, each in self.by_name.items()})

    def watch(self, evaluation: RunEvaluation) -> None:
        """Let it be said where one of them could never advance, or goes by the wrong end."""
        for each in self.by_name.values():
            each.watch(evaluation)

    def catch_up(self, state: TrainState) -> None:
        """Bring schedules that were made for a new horizon to where the training is."""
        for name, each in self.by_name.items():
            each.catch_up(replace(state, step=self.objectives.by_name[name].steps))

    def advance(self, unit: Literal["step", "epoch"], of: str = "") -> None:
        """Advance that of one optimizer, or those of all, if that is its pace."""
        for name, each in self.by_name.items():
            if of in ("", name):
                each.advance(unit)

    def advance_evaluation(self, metrics: Scalars) -> None:
        """Advance those that watch a metric."""
        for each in self.by_name.values():
            each.advance_evaluation(metrics)

    def each(self, steps: int | None) -> Iterator[tuple[str, LRSchedule, int | None]]:
        """As for one schedule."""
        for name, schedule in self.by_name.items():
            yield name, schedule, self.objectives.planned(name, steps)


@dataclass(frozen=True, slots=True)
class _Schedulers:
    by_name: Mapping[str, AnyScheduler]

    def state_dict(self) -> dict[str, Any]:
        return {name: scheduler.state_dict() for name, scheduler in self.by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, scheduler in self.by_name.items():
            scheduler.load_state_dict(state[name])


class NamedLR(LRScheduler):
    """A schedule over all updates of a run, by name.

    Each of `w` warm-up updates has a higher rate than the one before, from `1 / (w + 1)` of the
    optimizer's on. After them "constant" stays; "linear" and "cosine" fall to 0 at the end of the
    run; "wsd" (warm-up, stable, decay) stays, and falls linearly to 0 in the last fifth.
    The run has `total_steps` updates, where known; `warmup` is a fraction of them, or whole.
    """

    def __init__(
        self, optimizer: Optimizer, name: object, total_steps: int | None, warmup: float = 0
    ) -> None:
        check_argument("warmup", warmup, float)
        by_fraction = isinstance(warmup, float)
        limit = 1 if by_fraction else total_steps or math.inf
        known = total_steps is not None or (name == "constant" and not by_fraction)
        if name not in NAMES or not known or not 0 <= warmup < limit:
            from trainkit.basics.parsing import nearest  # only errors need it

            near = nearest(str(name), NAMES) if name not in NAMES else ""
            raise ConfigError(
                f"`lr_scheduler={name!r}` with `warmup={warmup!r}` is no schedule by name for "
                f"{total_steps or 'an unknown number of'} updates.{near} The names are "
                f"{', '.join(NAMES)}; `warmup` is a fraction of the run, such as 0.1, or a whole "
                "number of updates, fewer than the run has. Where these are not known, pass "
                "`Trainer(max_steps=...)`."
            )
        self.described = f"{name}, warmup={warmup}"
        self.shape, self.total_steps = name, None if name == "constant" else total_steps
        self.warmup_steps = round(warmup * (total_steps or 0)) if by_fraction else warmup
        super().__init__(optimizer)

    @override
    def get_lr(self) -> list[float | Tensor]:
        step, begin, end = self.last_epoch, self.warmup_steps, self.total_steps
        if step < begin:
            factor = (step + 1) / (begin + 1)
        elif end is None:
            factor = 1.0
        else:
            if self.shape == "wsd":
                begin = max(begin, end - math.ceil(end / 5))
            done = min(max(step - begin, 0) / (end - begin), 1.0)
            factor = (1 + math.cos(math.pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return [base * factor for base in self.base_lrs]


def by_name(lr_scheduler: Any, planned_steps: int | None, warmup: float) -> Any:
    """Return a callable `optimizer -> LRScheduler` for a name; what is none as it is."""
    if not isinstance(lr_scheduler, str) and warmup == 0:
        return lr_scheduler
    return partial(NamedLR, name=lr_scheduler, total_steps=planned_steps, warmup=warmup)


def make_lr_schedule(
    lr_scheduler: object | SchedulerFactory | None, optimizer: Optimizer
) -> LRSchedule | None:
    """Return the schedule, from a callable `optimizer -> LRScheduler` or as it is."""
    if lr_scheduler is None:
        return None
    if callable(lr_scheduler):
        lr_scheduler = lr_scheduler(optimizer)
    if isinstance(lr_scheduler, LRScheduler | ReduceLROnPlateau):
        lr_scheduler = LRSchedule(lr_scheduler, unit_is_assumed=True)
    if not isinstance(lr_scheduler, LRSchedule):
        raise ConfigError(
            "`lr_scheduler` must be an LRScheduler, an `LRSchedule`, a callable `optimizer -> "
            f"LRScheduler` or a name, but is or returns a {type(lr_scheduler).__name__!r}."
        )
    if lr_scheduler.scheduler.optimizer is not optimizer:
        raise ConfigError(
            "`lr_scheduler` belongs to another optimizer than the one that is used: it would "
            "change nothing. Pass a callable `optimizer -> LRScheduler`."
        )
    return lr_scheduler
