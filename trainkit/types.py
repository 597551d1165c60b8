"""Names for the values that pass between the parts."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = [
    "IGNORED",
    "NOTHING",
    "Alternating",
    "AnyScheduler",
    "Batch",
    "ByName",
    "LossFn",
    "OptimizerFactory",
    "Scalars",
    "SchedulerFactory",
    "Size",
    "Stateful",
    "StepOutput",
    "StepResult",
    "class_name",
]

Batch: TypeAlias = Any
"""What a loader yields: a tensor, or any nesting of containers that holds some."""

ByName: TypeAlias = Mapping[str, Any]
"""What each of several optimizers has, by its name."""

Scalars: TypeAlias = dict[str, float]
"""Values by name, such as `{"eval/loss": 0.41}`."""

Size: TypeAlias = int | str
"""A number of bytes, or text such as "5GB" (10**9 bytes) or "1GiB" (2**30 bytes)."""

NOTHING: AbstractContextManager[object] = nullcontext()
"""A context that does nothing, made once: the loop enters it in each step."""

IGNORED = -100
"""The label that losses leave out by convention (torch, transformers)."""

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

    A step whose loss is a sum of means over different items returns a mapping with one of these,
    or a loss without a weight, under the name of each term.

    Args:
        loss: Scalar with a graph: the mean loss over the micro-batch's items.
        weight: Number of items (samples, tokens, ...) that `loss` averages, at least 0. A tensor
            stays on its device. None: the number of samples in the micro-batch (rule 6).
            With weight 0 the loss may be NaN, but its gradient must not be: torch's
            `cross_entropy` over ignored labels alone is fine, `sum() / count` is not.
    """

    loss: Tensor
    weight: Tensor | float | None = None


@dataclass(frozen=True, slots=True)
class Alternating:
    """Several optimizers that take turns, in the place of one; as in a GAN.

    The trainer has a step for each, `training_step_<name>`, which returns its loss.

    Args:
        optimizers: By name, as `Trainer.fit` takes them.
        windows: How many windows in a row each one gets, in the order of the turns, such as
            `{"critic": 5, "actor": 1}`.
    """

    optimizers: Mapping[str, Any]
    windows: Mapping[str, int]


@dataclass(slots=True)
class StepResult:
    """What one window did (rules 8, 9)."""

    loss: Tensor
    """Weighted mean loss of this process's micro-batches; scalar on the device, detached."""
    grad_norm: Tensor | None = None
    """L2 norm over all parameters and processes before clipping; None where nothing clips."""
    skipped: bool = False
    """True where no update was applied."""
    optimizers: "Mapping[str, StepResult] | None" = None
    """The same for each optimizer that the window was for, where there are several losses; the
    `loss` is then the sum of theirs. One may have skipped while another was applied."""
    reason: str | None = None
    """Why none was."""
    weight: Tensor | float = 1
    """How much the loss counts in the mean over the processes."""


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class as its author wrote it, for messages.

    `fully_shard` puts a class of its own, with `FSDP` before the name, in front of it.
    """
    cls = type(module)
    bases = [base.__name__ for base in cls.__bases__]
    return bases[1] if bases[0] == "FSDPModule" and len(bases) > 1 else cls.__name__
