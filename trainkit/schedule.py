"""When a learning-rate scheduler advances."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.errors import ConfigError
from trainkit.state import TrainState
from trainkit.types import AnyScheduler, Scalars

__all__ = ["LRSchedule"]


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """A scheduler and when it advances: once per applied step unless said otherwise.

    Args:
        scheduler: The scheduler. `ReduceLROnPlateau` needs `metric`.
        every: "step": after each applied update. "epoch": at the end of each epoch.
        metric: A figure such as "eval/loss"; the scheduler then advances after each evaluation
            and is given its value.
    """

    scheduler: AnyScheduler
    every: Literal["step", "epoch"] = "step"
    metric: str | None = None

    def __post_init__(self) -> None:
        if self.every not in ("step", "epoch"):
            raise ConfigError(f'`every` must be "step" or "epoch", but is {self.every!r}.')
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.metric is None:
            raise ConfigError(
                "`ReduceLROnPlateau` must know which figure to watch. Return "
                '`LRSchedule(scheduler, metric="eval/loss")` from the scheduler callable.'
            )

    def check(self, figures: Iterable[str] | None) -> None:
        """Raise where the schedule could never advance.

        Args:
            figures: Names that an evaluation gives; empty without one, None where not known.
        """
        if self.metric is None or figures is None or self.metric in figures:
            return
        if not figures:
            raise ConfigError(
                f"`LRSchedule` watches {self.metric!r}, but `fit` was given no evaluation loader. "
                "Pass `(train_loader, eval_loader)`."
            )
        raise ConfigError(
            f"`LRSchedule` watches {self.metric!r}, but the evaluation gives only "
            f"{sorted(figures)}. Use one of these."
        )

    def catch_up(self, state: TrainState) -> None:
        """Bring a schedule that was made for a new horizon to where the training is."""
        if self.metric is not None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the updates, which were made before
            for _ in range(state.step if self.every == "step" else state.epoch):
                self.scheduler.step()  # type: ignore[call-arg]

    def advance_step(self) -> None:
        """Advance after an applied update, if that is this schedule's pace."""
        if self.metric is None and self.every == "step":
            self.scheduler.step()  # type: ignore[call-arg]

    def advance_epoch(self) -> None:
        """Advance at the end of an epoch, if that is this schedule's pace."""
        if self.metric is None and self.every == "epoch":
            self.scheduler.step()  # type: ignore[call-arg]

    def advance_evaluation(self, metrics: Scalars) -> None:
        """Advance after an evaluation, if this schedule watches one of its figures."""
        self.check(metrics)
        if self.metric is None:
            return
        self.scheduler.step(metrics[self.metric])  # type: ignore[arg-type]
