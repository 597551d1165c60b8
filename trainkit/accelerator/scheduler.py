"""A learning-rate scheduler that follows the prepared optimizers."""

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.optimizer import PreparedOptimizer
from trainkit.basics.torch_internals import steps_of_schedule


class PreparedScheduler:
    """What `prepare` makes of a scheduler.

    It steps where the optimizers have stepped: not inside a window and not after an overflow. As
    in Accelerate, one step counts as many steps as there are processes, unless
    `split_batches`, because a script counts the steps of one process; `ReduceLROnPlateau`, which
    counts evaluations, takes one.

    Args:
        optimizers: The prepared ones that it follows.
        accumulation: Tells whether the present micro-batch ends its window.
        steps: What one step counts.
        step_with_optimizer: Whether it follows them at all; else every call is one step.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        accumulation: Accumulation,
        *,
        steps: int,
        step_with_optimizer: bool,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._accumulation = accumulation
        self._steps = steps
        self._step_with_optimizer = step_with_optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizers have stepped; takes what the scheduler's own `step` takes."""
        if not self._step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        skipped = any(optimizer.step_was_skipped for optimizer in self.optimizers)
        if skipped or not self._accumulation.sync_gradients:
            return
        total = getattr(self.scheduler, "total_steps", None)
        # One metric is one observation: seen twice, it would have stopped improving.
        follows_metric = isinstance(self.scheduler, ReduceLROnPlateau)
        for _ in range(1 if follows_metric else self._steps):
            # A one-cycle schedule raises beyond its end, where the last steps may lead.
            if total is None or steps_of_schedule(self.scheduler) <= total:
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler inside."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the state to the scheduler inside."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Return what else the scheduler inside has."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
