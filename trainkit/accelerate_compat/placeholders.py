"""Objects of Accelerate that hold what an engine is to make of them, and do nothing themselves."""

from typing import Any


class DummyOptim:
    """Stands for the optimizer of DeepSpeed's own settings; `prepare` hands it back.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        weight_decay: Of the optimizer.
        **kwargs: More of its arguments.
    """

    def __init__(
        self, params: Any, lr: float = 0.001, weight_decay: float = 0, **kwargs: Any
    ) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler:
    """Stands for the schedule of DeepSpeed's own settings; `prepare` hands it back.

    Args:
        optimizer: What it is for.
        total_num_steps: Updates in all.
        warmup_num_steps: Updates until the rate is whole.
        lr_scheduler_callable: Makes a schedule of an optimizer.
        **kwargs: More of its arguments.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Any = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.kwargs = optimizer, kwargs
        self.total_num_steps, self.warmup_num_steps = total_num_steps, warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
