"""Optimizers that compute the gradients again in their step, such as LBFGS and SAM."""

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.data import MicroBatch, Window
from trainkit.errors import ConfigError
from trainkit.precision import Precision
from trainkit.training import loop
from trainkit.training.callback import CallbackList
from trainkit.training.run import Run

__all__ = ["Closure", "closure_for"]


def closure_for(run: Run) -> "Closure | None":
    """Return what the optimizer of a run computes gradients by; None where it does not.

    Raises:
        ConfigError: It cannot have one: gradients are scaled, or it is one of several.
    """
    optimizers = [named.optimizer for named in run.optimizers.values()] or [run.optimizer]
    needing = [optimizer for optimizer in optimizers if _is_required(optimizer) or _asks(optimizer)]
    if not needing:
        return None
    why = f"`{type(needing[0]).__name__}` computes gradients again in its step, which"
    if run.optimizers:
        raise ConfigError(f"{why} is not offered with several optimizers. Train with it alone.")
    kind = type(run.precision)
    if kind.unscale is not Precision.unscale or kind.step is not Precision.step:
        raise ConfigError(
            f"{why} `precision={run.precision.name!r}` cannot do: it has an `unscale` or a `step` "
            'of its own. Use `precision="bf16"` or "fp32".'
        )
    return Closure(run)


def _is_required(optimizer: Optimizer) -> bool:
    """Return whether `step` of an optimizer cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _asks(optimizer: Optimizer) -> bool:
    """Return whether the class of an optimizer says that it needs one."""
    return bool(getattr(optimizer, "needs_closure", False))


class Closure:
    """Computes loss and gradients of the window under way once more, as they are applied.

    What it returns is the mean loss of the window over all processes, so that all of them decide
    alike. Nothing is put back in between: dropout draws anew, and statistics of the batch count
    again, as in a loop by hand. Hooks and `run.log` see the first time alone.

    LBFGS calls it before it moves the weights, so its first call finds what the loop has just
    computed. Others may have moved the weights or cleared the gradients by then: they compute.

    Args:
        run: With one optimizer, and without a loss scale.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._batches: list[MicroBatch] = []
        self._window = Window(iter(()))
        step = inspect.unwrap(type(run.optimizer).step)
        self._begins = step is inspect.unwrap(torch.optim.LBFGS.step)
        self._is_computed = False

    def train_step(self, run: Run, callbacks: CallbackList, window: Window) -> None:
        """Do what `loop.train_step` does, and keep the micro-batches for the optimizer."""
        self._batches, self._is_computed = [], self._begins
        self._window = window
        loop.train_step(run, callbacks, window.through(self._keep))

    def __call__(self) -> Tensor:
        if self._is_computed:
            self._is_computed = False
            return self._loss()
        run, window = self._run, self._window
        run.optimizer.zero_grad(set_to_none=True)
        run.weighting.begin(Window(iter(()), window.total, window.size))
        present, run.logging.zero_weight = run.logging.zero_weight, True
        try:
            with torch.enable_grad():
                for micro_batch in self._batches:
                    if micro_batch.count == 0:
                        with run.as_zero_weight():
                            loop.forward_backward(run, micro_batch)
                        run.logging.zero_weight = True
                    else:
                        loop.forward_backward(run, micro_batch)
        finally:
            run.logging.zero_weight = present
        run.reduce_gradients()
        loop.clip(run)
        return self._loss()

    def _keep(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        for micro_batch in batches:
            self._batches.append(micro_batch)
            yield micro_batch

    def _loss(self) -> Tensor:
        loss, weight = self._run.weighting.result()
        if self._run.strategy.processes.size == 1:
            return loss
        sums = torch.stack([loss * weight, torch.as_tensor(weight, device=loss.device)]).to(loss)
        total, weights = self._run.strategy.processes.all_reduce(sums)
        mean: Tensor = total / weights
        return mean
