"""An optimizer that waits for the end of its window and leaves out a step on overflow."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.gradients import Gradients
from trainkit.errors import ConfigError


def _of_inner(name: str) -> Any:
    """Return a property that is that of the optimizer inside."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
    )


class PreparedOptimizer(Optimizer):
    """What `prepare` makes of an optimizer; its groups and state are those of the one inside.

    Args:
        accumulation: Tells whether the present micro-batch ends its window.
        gradients: Makes them final and tells of an overflow.
        before_first: Called once, before the first update.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        accumulation: Accumulation,
        gradients: Gradients,
        before_first: Callable[[], None] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.step_was_skipped = False
        """Whether the latest step was left out because of an overflow."""
        self._accumulation = accumulation
        self._gradients = gradients
        self._before_first = before_first

    scaler = property(
        attrgetter("_gradients.scaler"),
        lambda self, value: setattr(self._gradients, "scaler", value),
        doc="The scaler of fp16; None without one.",
    )

    # `Optimizer` has these as attributes; they must never differ from those inside.
    state: Any = _of_inner("state")
    param_groups: Any = _of_inner("param_groups")
    defaults: Any = _of_inner("defaults")

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state_dict))

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, but only where the window has ended."""
        if self._accumulation.sync_gradients:
            self.optimizer.zero_grad(set_to_none)
            self._gradients.mark_used(self.optimizer)

    @override
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters where the window has ended and nothing overflowed."""
        if not self._accumulation.sync_gradients:
            return None
        if closure is not None:
            if self._gradients.scaler is not None:
                raise ConfigError(
                    "`step(closure)` computes gradients after they were unscaled, which fp16 "
                    'cannot do. Use `mixed_precision="bf16"` or "no" with this optimizer.'
                )
            value = self.optimizer.step(closure)
            self._gradients.mark_used(self.optimizer)
            return value
        if self._before_first is not None:
            self._before_first()
            self._before_first = None
        self.step_was_skipped = self._gradients.unscale_once(self.optimizer)
        if not self.step_was_skipped:
            self.optimizer.step()
        self._gradients.mark_used(self.optimizer)
        return None

    def train(self) -> None:
        """Switch an optimizer that has modes of its own to training."""
        getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> None:
        """Switch an optimizer that has modes of its own to evaluation."""
        getattr(self.optimizer, "eval", lambda: None)()

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let what is pickled or copied be the optimizer inside: windows belong to a process."""
        return _arrived, (self.optimizer,)

    def __getattr__(self, name: str) -> Any:
        """Return what else the optimizer inside has."""
        if name in ("optimizer", "_accumulation", "_gradients", "_before_first"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @override
    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


def _arrived(optimizer: Optimizer) -> Optimizer:
    return optimizer
