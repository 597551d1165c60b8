"""Models that come parallel under a loop of the user's own."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.errors import ConfigError
from trainkit.precision import FP32, Precision
from trainkit.strategies import ModelParallel


class LoopModelParallel(ModelParallel):
    """A model that comes parallel, for a loop that calls `backward` and `step` itself.

    Each backward adds to what there is; a clip or the step makes the gradients of a window final.
    Those that are averaged already stay as they are, should more be added and all averaged again.
    """

    _model: nn.Module | None = None
    _is_open = _is_checked = False

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        if self._model is not None:
            raise ConfigError(
                '`strategy="model_parallel"` drives one model in a loop of your own, but another '
                "one is prepared. Keep it unprepared, or call `accelerator.free_memory()` before."
            )
        self._is_open = self._is_checked = False
        self._model = super().wrap(model, precision, seed)
        return self._model

    def release(self) -> None:
        """Let go of the model, so that another one can be prepared."""
        self._model = None

    @override
    def rebind_optimizer(self, optimizer: Optimizer, module: nn.Module) -> None:
        super().rebind_optimizer(optimizer, module)
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"`{type(optimizer).__name__}.step(closure)` uses gradients that are not averaged "
                'over the processes yet, which `strategy="model_parallel"` does before a step. '
                "Use an optimizer that steps without a closure."
            )
        self.complete()

    def before_backward(self) -> None:
        """Let what sums gradients up in a backward see those of this one alone."""
        if self._model is not None:
            self._set_aside(self._model)

    def after_backward(self) -> None:
        """Add what the backward has left to what earlier ones have."""
        self._put_together()
        self._is_open = True

    def complete(self) -> None:
        """Make the gradients of a window final, if there are any; all processes must call it."""
        if self._is_open and self._model is not None:
            self._is_open = False
            self.finish_reduction(self._model, FP32())
            if not self._is_checked:
                self._is_checked = True
                self.check_gradients(self._model)

    @override
    def clip_grad_norm(self, parameters: Iterable[Any], max_norm: float) -> Tensor:
        self.complete()
        return super().clip_grad_norm(parameters, max_norm)

    @override
    def clip_grad_value(self, parameters: Iterable[Tensor], max_value: float) -> None:
        self.complete()
        super().clip_grad_value(parameters, max_value)
