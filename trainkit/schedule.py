"""When a learning-rate scheduler advances, and what an optimizer that needs none does instead."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.errors import ConfigError
from trainkit.state import TrainState
from trainkit.types import AnyScheduler, Scalars

__all__ = ["EvaluationWeights", "LRSchedule"]

_KEY = "training_weights"


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


class EvaluationWeights:
    """Switches the parameters of an optimizer that has `train()` and `eval()`, to the last bit.

    Schedule-free optimizers train on other weights than those that are good to evaluate, and go
    from the ones to the others and back only up to rounding. So those of training are kept while
    the parameters hold those of evaluation. With an optimizer that has no such methods nothing is
    ever done.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        methods = (getattr(optimizer, name, None) for name in ("train", "eval"))
        self._optimizer: Any = optimizer if all(map(callable, methods)) else None
        self._training: list[Tensor] | None = None  # while the parameters hold others

    def train(self) -> None:
        """Let the parameters hold the weights of training."""
        if self._optimizer is None:
            return
        self._optimizer.train()
        if self._training is not None:
            with torch.no_grad():
                for parameter, weights in zip(self._parameters(), self._training, strict=True):
                    parameter.copy_(weights)
            self._training = None

    def evaluate(self) -> None:
        """Let the parameters hold the weights of evaluation."""
        if self._optimizer is not None and self._training is None:
            self._training = [parameter.detach().clone() for parameter in self._parameters()]
            self._optimizer.eval()

    @contextmanager
    def held(self, *, error_is_last: bool = False) -> Iterator[None]:
        """Let the parameters hold the weights of evaluation inside.

        Args:
            error_is_last: After an error they stay, as the training ends with it; callbacks that
                exchange weights too then find theirs.
        """
        if self._training is not None:
            yield
            return
        self.evaluate()
        try:
            yield
        except BaseException:
            if not error_is_last:
                self.train()
            raise
        self.train()

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights of training by name, while the parameters hold others."""
        if self._training is None:
            return {}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        weights = zip(self._parameters(), self._training, strict=True)
        return {_KEY: {names[id(parameter)]: kept for parameter, kept in weights}}

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Take the weights of training from a state that holds them; `train` puts them back."""
        if self._optimizer is not None and _KEY in state:
            names = {id(parameter): name for name, parameter in module.named_parameters()}
            self._training = [state[_KEY][names[id(p)]] for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]
