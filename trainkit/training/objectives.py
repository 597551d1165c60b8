"""What a training learns: losses, and the optimizers that make them smaller."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics.config import TrainConfig
from trainkit.data import MicroBatch, Window
from trainkit.errors import ConfigError
from trainkit.precision import Precision
from trainkit.training.run_parts import TrainState
from trainkit.training.weighting import Weighting, loss_of
from trainkit.types import NOTHING, Batch, StepResult

TrainingStep: TypeAlias = Callable[[nn.Module, Batch], Any]


@dataclass(kw_only=True, eq=False)
class Objective:
    """A loss, and the optimizer that makes it smaller."""

    name: str = ""
    """That of the optimizer, where there are several losses."""
    optimizer: Optimizer
    precision: Precision
    """Scales the loss."""
    weighting: Weighting
    model: nn.Module
    """What the strategy made of the user's module, to reduce the gradients of this loss."""
    closure: Callable[[], Any] | None = None
    """What the optimizer computes loss and gradients of the window by once more."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def backward(self, loss: Tensor, *, is_last: bool, retain_graph: bool) -> None:
        """Accumulate the gradients of a loss that was weighed.

        Args:
            loss: Of a micro-batch.
            is_last: Whether the window ends with it: then gradients are reduced.
            retain_graph: Whether another loss of the same forward comes after it.
        """
        strategy = self.weighting.strategy
        if is_last and strategy.processes.size > 1:
            strategy.begin_reduction(self.model)
        self.weighting.backward(loss, self.precision.backward, retain_graph=retain_graph)

    def finish(self, state: TrainState) -> bool:
        """Reduce, normalise and unscale the gradients of a window; return whether they overflowed.

        What one process finds holds for all of them.
        """
        strategy = self.weighting.strategy
        if strategy.processes.size > 1:
            self.model = strategy.finish_reduction(self.model, self.precision)
        if (correction := self.weighting.correction()) is not None:
            strategy.scale_gradients(self.parameters, correction)
        if state.step == state.skipped_steps == 0:  # the first window of the training
            strategy.check_gradients(self.weighting.module)
        updated = strategy.updated(self.optimizer)
        return self.precision.unscale(updated, strategy.reduce_overflow)

    def clip(self, config: TrainConfig) -> Tensor | None:
        """Clip the gradients as the settings say; return their norm before, where it is taken."""
        strategy, norm = self.weighting.strategy, None
        if config.max_grad_norm is not None:
            norm = strategy.clip_grad_norm(self.parameters, config.max_grad_norm)
        if config.max_grad_value is not None:
            strategy.clip_grad_value(self.parameters, config.max_grad_value)
        return norm


Losses: TypeAlias = Iterable[tuple[Objective, Tensor, bool]]
"""Objectives and their losses of a micro-batch, and of each whether another one comes after it."""


class Objectives:
    """Those of a training: here one loss, and an optimizer, or several that share the loss.

    Attributes:
        active: Those that the window under way is for, as far as that is known.
    """

    by_name: Mapping[str, Any] = MappingProxyType({})
    """Several optimizers, each with what it has for itself."""

    def __init__(self, objective: Objective) -> None:
        self._of_all = objective
        self.active = [objective]

    def planned(self, name: str, windows: int | None) -> int | None:
        """Return how many of the first so many windows are for one of several optimizers."""
        return windows

    def begin(self, window: Window, state: TrainState) -> AbstractContextManager[object]:
        """Start a window; return what must hold until its gradients are complete."""
        self._of_all.weighting.begin(window)
        return NOTHING

    def losses(self, step: TrainingStep, micro_batch: MicroBatch) -> Losses:
        """Make a forward, and return the losses to be run backward."""
        output = step(self._of_all.model, micro_batch.data)
        return ((self._of_all, self._of_all.weighting.weigh(output, micro_batch), False),)

    def optimize(self, name: object, loss: object, weight: Any, loader: str) -> None:
        """Keep a loss for one of several optimizers until the step has returned."""
        raise ConfigError(
            "`run.optimize` gives a loss to one of several optimizers, but this training has one. "
            "Return the loss from `training_step`, or name several: "
            '`fit(..., optimizer={"a": ..., "b": ...})`.'
        )

    def put_together(self, results: Mapping[str, StepResult]) -> StepResult:
        """Count a window for each of several optimizers; return what came of it as one result."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, beside the optimizer and the precision."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    # What may be asked about the latest window.

    @property
    def model(self) -> nn.Module:
        """What the training step calls."""
        return self._of_all.model

    @property
    def samples(self) -> int:
        """Its real samples so far, over all processes."""
        return self.active[0].weighting.samples if self.active else 0

    def loss(self) -> Tensor:
        """Return its mean loss on this process; that of several is their sum."""
        first, *others = [each.weighting.result()[0] for each in self.active]
        return sum(others, start=first)

    def loss_in(self, output: object) -> Tensor:
        """Return the loss of a training step that has returned `output`."""
        return loss_of(output)

    def is_finite(self) -> bool:
        """Return whether its losses on this process are finite; reads the device."""
        return all(each.weighting.is_finite() for each in self.active)

    def close(self) -> None:
        """Give back what the strategy has wrapped."""
        for each in (self._of_all, *self.by_name.values()):
            each.model = each.weighting.module
