"""A learning-rate scheduler that follows the prepared optimizers."""

from collections.abc import Mapping, Sequence
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
        self.pace = [steps if step_with_optimizer else 1] * 2
        """What one step counts, and would in a schedule of the script's present length."""
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
        for _ in range(1 if follows_metric else self.pace[0]):
            # A one-cycle schedule raises beyond its end, where the last steps may lead.
            if total is None or steps_of_schedule(self.scheduler) <= total:
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def go_on(
        self, state: dict[str, Any], pace: list[int], *, splits: bool, windows: float
    ) -> None:
        """Load the state of a training whose batches other processes may have shared.

        Args:
            state: The state of the scheduler inside.
            pace: Its `pace`.
            splits: Whether more processes have smaller batches.
            windows: Micro-batches of a window then for one of now.
        """
        now = self.pace[1]
        more = (now / pace[1] if splits else 1) * windows if now != pace[1] else 1
        if "lr_lambdas" not in state:  # it holds its length
            self.pace = [max(1, round(pace[0] * now / (pace[1] * more))), now]
        elif more != 1:  # its length is that of the script, and so of now
            count = round(state["last_epoch"] * more)
            state = {**state, "last_epoch": count, "_step_count": count + 1}
        self.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        """Return what else the scheduler inside has."""
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def shares_of(loaders: Sequence[Any], saved: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """Return what `PreparedScheduler.go_on` asks of loaders and windows."""
    name = "samples of a global batch"
    facts = [each.get("facts", {}).get(name) for each in saved["loaders"]]
    pairs = zip(loaders, facts, strict=False)
    same = [was == now for one, was in pairs if was and (now := one.order_facts().get(name))]
    micro = saved.get("micro_batches", 0) / num_steps
    return {"splits": any(same) or not same, "windows": micro if same and micro else 1}
