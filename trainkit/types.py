"""Names for the values that pass between the parts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = [
    "AnyScheduler",
    "Batch",
    "LossFn",
    "OptimizerFactory",
    "Scalars",
    "SchedulerFactory",
    "Stateful",
    "StepOutput",
    "StepResult",
]

Batch: TypeAlias = Any
"""What a loader yields: a tensor, or any nesting of containers that holds some."""

Scalars: TypeAlias = dict[str, float]
"""Figures by name, such as `{"eval/loss": 0.41}`."""

AnyScheduler: TypeAlias = LRScheduler | ReduceLROnPlateau
LossFn: TypeAlias = Callable[[Any, Any], Tensor]
OptimizerFactory: TypeAlias = Callable[[Iterable[Any]], Optimizer]
SchedulerFactory: TypeAlias = Callable[[Optimizer], Any]


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken out and put back."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take the state back."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a training step may return: a mean loss and how much it counts.

    Args:
        loss: Scalar with a graph: the mean loss over the micro-batch's items.
        weight: Number of items (samples, tokens, ...) that `loss` averages, at least 0. A tensor
            stays on its device. None: the number of samples in the micro-batch (DESIGN 2.6).
            With weight 0 the loss may be NaN, but its gradient must not be: torch's
            `cross_entropy` over ignored labels alone is fine, `sum() / count` is not.
    """

    loss: Tensor
    weight: Tensor | float | None = None


@dataclass(slots=True)
class StepResult:
    """What one window did (DESIGN 2.8, 2.9)."""

    loss: Tensor
    """Weighted mean loss of this process's micro-batches; scalar on the device, detached."""

    grad_norm: Tensor | None = None
    """L2 norm over all parameters and processes before clipping; None where nothing clips."""

    skipped: bool = False
    """True where no update was applied."""
