"""Find the first loss or gradient that is NaN or infinite."""

import math
from typing import Literal

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.callbacks._support.first_bad import FirstBad
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["NaNGuard"]

MOST_STEPS = 1024  # between two checks


class NaNGuard(Callback):
    """Acts on a loss or gradient that is NaN or infinite (rule 11).

    The overflows that fp16 finds by itself are none of its business. It must be in the list of
    callbacks on every process.

    Args:
        policy: "raise": the first bad step is kept on the device, without reading it, and looked
            at where values are logged, at the end of an epoch, before an evaluation and at the
            end; then `NonFiniteError` is raised on all processes. "skip": a window whose global
            gradient norm is not finite is not applied; costs one read of the device a step.
            Buffers that the forward changed, such as batch statistics, stay changed.
    """

    alike = ("policy",)

    @checked
    def __init__(self, policy: Literal["raise", "skip"] = "raise") -> None:
        self.policy = policy
        self._first_bad: FirstBad | None = None

    @override
    def on_fit_start(self, run: Run) -> None:
        self._first_bad = FirstBad(run) if self.policy == "raise" else None

    @override
    def on_gradients(self, run: Run) -> None:
        if self._first_bad is not None:
            self._first_bad.see_gradients(run)
            return
        norm = run.strategy.grad_norm(run.parameters).item()  # equal on all processes
        if not math.isfinite(norm):
            run.request_skip(f"the gradient norm is {norm}")

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._first_bad is not None:
            self._first_bad.end_step(run, result.loss)
            is_last = run.state.step == run.planned_steps
            if run.is_log_step or is_last or self._first_bad.unchecked >= MOST_STEPS:
                self._first_bad.check(run)

    def _check(self, run: Run) -> None:
        if self._first_bad is not None:
            self._first_bad.check(run)

    on_epoch_end = on_evaluation_start = on_checkpoint_start = _check

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._first_bad = None  # a check is a collective, which the others may not come to

    @override
    def on_fit_end(self, run: Run) -> None:
        self._check(run)
        self._first_bad = None
