"""Optimizers that compute the gradients again in their step, such as LBFGS and SAM."""

import inspect
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.data import MicroBatch, Window
from trainkit.errors import ConfigError
from trainkit.precision import Precision
from trainkit.training import loop
from trainkit.training.objectives import Losses, Objective, Objectives, TrainingStep
from trainkit.training.run import Run
from trainkit.training.run_parts import TrainState


def give_closure(run: Run) -> None:
    """Give the optimizer of a run what it computes gradients by, where it does."""
    optimizers = [each.optimizer for each in run.optimizers.values()] or [run.optimizer]
    needing = [each for each in optimizers if _needs_closure(each)]
    if not needing:
        return
    why = f"`{type(needing[0]).__name__}` computes gradients again in its step, which"
    if run.optimizers:
        raise ConfigError(f"{why} is not offered with several optimizers. Train with it alone.")
    kind = type(run.precision)
    if kind.unscale is not Precision.unscale or kind.step is not Precision.step:
        raise ConfigError(
            f"{why} `precision={run.precision.name!r}` cannot do: it has an `unscale` or a `step` "
            'of its own. Use `precision="bf16"` or "fp32".'
        )
    (objective,) = run.objectives.active
    run.objectives = ComputedAgain(run, objective)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` requires a closure, or the class of an optimizer says so."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    is_required = closure is not None and closure.default is closure.empty
    return is_required or bool(getattr(optimizer, "needs_closure", False))


class ComputedAgain(Objectives):
    """One loss, of which an optimizer asks for the gradients of the window under way once more.

    What it is given is the mean loss of the window over all processes, so that all of them decide
    alike. Nothing is put back in between: dropout draws anew, and statistics of the batch count
    again, as in a loop by hand. Hooks and `run.log` see the first time alone.

    LBFGS calls it before it moves the weights, so its first call finds what the loop has just
    computed. Others may have moved the weights or cleared the gradients by then: they compute.
    """

    def __init__(self, run: Run, objective: Objective) -> None:
        super().__init__(objective)
        self._run = run
        self._batches: list[MicroBatch] = []
        step = inspect.unwrap(type(run.optimizer).step)
        self._begins = step is inspect.unwrap(torch.optim.LBFGS.step)
        self._is_computed = False
        objective.closure = self._compute

    @override
    def begin(self, window: Window, state: TrainState) -> AbstractContextManager[object]:
        self._window, self._batches = window, []
        self._is_computed = self._begins
        return super().begin(window, state)

    @override
    def losses(self, step: TrainingStep, micro_batch: MicroBatch) -> Losses:
        self._batches.append(micro_batch)
        return super().losses(step, micro_batch)

    def _compute(self) -> Tensor:
        if self._is_computed:
            self._is_computed = False
            return self._mean()
        run, objective, batches = self._run, self._of_all, self._batches
        objective.optimizer.zero_grad(set_to_none=True)
        self.begin(Window(iter(()), self._window.total, self._window.size), run.state)
        self._is_computed = False
        present, run.logging.zero_weight = run.logging.zero_weight, True
        try:
            with torch.enable_grad():
                for micro_batch in batches:
                    if micro_batch.count == 0:
                        with run.as_zero_weight():
                            loop.forward_backward(run, micro_batch)
                        run.logging.zero_weight = True
                    else:
                        loop.forward_backward(run, micro_batch)
        finally:
            run.logging.zero_weight = present
        objective.finish(run.state)
        objective.clip(run.config)
        return self._mean()

    def _mean(self) -> Tensor:
        """Return the mean loss of the window over all processes."""
        loss, weight = self._of_all.weighting.result()
        processes = self._run.strategy.data_processes
        if processes.size == 1:
            return loss
        sums = torch.stack([loss * weight, torch.as_tensor(weight, device=loss.device)]).to(loss)
        total, weights = processes.all_reduce(sums)
        mean: Tensor = total / weights
        return mean
