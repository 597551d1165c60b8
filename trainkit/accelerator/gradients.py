"""What happens to gradients between a backward and an update, in a loop of the user's own."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.accelerator.accumulation import Accumulation
from trainkit.accelerator.parallel_loop import LoopModelParallel
from trainkit.accelerator.zero_loop import LoopDeepSpeed
from trainkit.basics.torch_internals import has_unreduced_shards, unscaled_optimizers
from trainkit.errors import ConfigError
from trainkit.precision import FP16, Precision
from trainkit.precision.fp16 import scaled_loss
from trainkit.strategies import Strategy
from trainkit.strategies.strategy import gradient_values


class Gradients:
    """Divides and scales losses, and makes gradients final before they are clipped or used.

    An overflow is read from the scaler's own flag, and gradients are always unscaled here, so a
    fused optimizer never sees the scale (rule 9). The scale changes when the gradients of
    every optimizer have been unscaled, or before the next backward at the latest: optimizers that
    share a backward share its scale.

    Args:
        models: Those that are prepared, whose parameters an error names.
        scaled: Whether fp16 scales losses.
    """

    def __init__(
        self,
        accumulation: Accumulation,
        precision: Precision,
        strategy: Strategy,
        *,
        models: Sequence[nn.Module],
        scaled: bool,
    ) -> None:
        scales = isinstance(precision, FP16) and scaled
        self._fp16 = precision if isinstance(precision, FP16) else FP16()
        self._scaler = self._fp16.scaler if scales else None
        self._models = models
        self._loss = torch.tensor(math.nan)  # the latest, not scaled
        self.optimizers: list[Optimizer] = []
        """Those that were prepared."""
        self._used: set[int] = set()  # those that used or cleared what the latest backward left
        self._accumulation = accumulation
        self._strategy = strategy
        self._zero = strategy if isinstance(strategy, LoopDeepSpeed | LoopModelParallel) else None
        self._unscaled: dict[int, tuple[int, bool]] = {}  # the window, and whether they overflowed

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The scaler of fp16; None without one. Another may be set."""
        return self._scaler

    @scaler.setter
    def scaler(self, value: torch.amp.GradScaler | None) -> None:
        self._scaler = value if value is not None and value.is_enabled() else None

    @property
    def are_unused(self) -> bool:
        """Whether there are gradients, and no optimizer has used or cleared its own."""
        waits = any(map(has_unreduced_shards, self._models))
        return not self._used and bool(self.optimizers and (waits or self.unused()))

    def unused(self) -> list[Tensor]:
        """Return the parameters whose gradients an optimizer has not used since a backward."""
        waiting = [each for each in self.optimizers if id(each) not in self._used]
        parameters = [p for each in waiting for group in each.param_groups for p in group["params"]]
        return [p for p in parameters if p.grad is not None]

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Add the gradients of `loss`, divided by the size of the window, to the others."""
        if not isinstance(loss, Tensor):
            raise ConfigError(f"`loss` must be a scalar tensor, but is a {type(loss).__name__}.")
        if loss.numel() != 1 and kwargs.get("gradient") is None:
            raise ConfigError(
                f"`loss` must be a scalar, but has the shape {list(loss.shape)}. Take its mean or "
                "sum, or pass `gradient=`."
            )
        if self._accumulation.divisor != 1:
            loss = loss / self._accumulation.divisor
        if self._scaler is not None:
            self._refresh()
            self._loss = loss.detach()
            loss = scaled_loss(self._scaler, loss)
        if self._zero is not None:
            self._zero.before_backward()
        loss.backward(**kwargs)
        if self._zero is not None:
            self._zero.after_backward()
        self._used.clear()

    def unscale_once(self, optimizer: Optimizer) -> bool:
        """Make the gradients of an optimizer final, once a window; return if they overflowed."""
        key = id(optimizer)
        window, overflowed = self._unscaled.get(key, (-1, False))
        if window == self._accumulation.window:
            return overflowed
        if not self._accumulation.sync_gradients:
            if self._scaler is None:
                return False
            raise ConfigError(
                "The gradients are scaled, and not complete before the last micro-batch of the "
                "window. Clip or read them only `if accelerator.sync_gradients:`."
            )
        if self._zero is not None:
            self._zero.complete()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._accumulation.correction != 1.0:
            self._strategy.scale_gradients(parameters, self._accumulation.correction)
        overflowed = self._scaler is not None and self._unscale(self._scaler, optimizer)
        self._unscaled[key] = self._accumulation.window, overflowed
        return overflowed

    def mark_used(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has made its step, or has left it out."""
        self._used.add(id(optimizer))
        self._unscaled.pop(id(optimizer), None)
        if self._scaler is not None and not self._unscaled:
            unscaled = unscaled_optimizers(self._scaler)
            if all(id(self._strategy.updated(known)) in unscaled for known in self.optimizers):
                self._refresh()

    def forget(self) -> None:
        """Begin anew: what was made final no longer counts."""
        self._unscaled.clear()
        self._used.clear()
        if self._scaler is not None:
            unscaled_optimizers(self._scaler).clear()

    def clip_norm(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip the norm of the final gradients; return what it was, on the device."""
        clipped = self._unscale_owners(parameters)
        if norm_type == 2:
            return self._strategy.clip_grad_norm(clipped, max_norm)
        if self._zero is not None:
            raise ConfigError(
                f'`strategy="{self._strategy.name}"` clips by the L2 norm, but `norm_type` is '
                f"{norm_type!r}. Leave it out."
            )
        norm = nn.utils.get_total_norm(gradient_values(clipped), norm_type)
        nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
        return norm

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip every element of the final gradients."""
        self._strategy.clip_grad_value(self._unscale_owners(parameters), clip_value)

    def scale_state(self) -> dict[str, Any]:
        """Return the state of the loss scale; empty without one."""
        self._refresh()
        return {} if self._scaler is None else self._scaler.state_dict()

    def _unscale_owners(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """Make the gradients final of each optimizer that has one of the parameters."""
        clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        wanted = {id(parameter) for parameter in clipped}
        for optimizer in self.optimizers:
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"]):
                self.unscale_once(optimizer)
        return clipped

    def _unscale(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
        self._fp16.scaler = scaler
        updated, reduce_overflow = self._strategy.updated(optimizer), self._strategy.reduce_overflow
        overflowed = self._fp16.unscale(updated, reduce_overflow, update=False)
        if self._fp16.exhausted:
            from trainkit.training.finite import low_scale  # most loops need none of it

            models = nn.ModuleList(self._strategy.unwrap(model) for model in self._models)
            loss, done = self._loss * self._accumulation.divisor, self._accumulation.window - 1
            raise low_scale(self._strategy, models.named_parameters(), loss, step=done)
        return overflowed

    def _refresh(self) -> None:
        """Let the scale follow the gradients that were unscaled since it last did."""
        if self._scaler is not None and unscaled_optimizers(self._scaler):
            self._scaler.update()
