"""float16 under autocast, with a loss scale that adapts itself and skips a step on overflow."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.device import has_loss_scaling
from trainkit.basics.torch_internals import found_inf, loss_scale, make_loss_scale
from trainkit.errors import ConfigError
from trainkit.precision.precision import Precision


class FP16(Precision):
    """Runs matrix products in float16 and scales the loss so that small gradients survive.

    An overflow is read from the scaler's `found_inf`, for fused and unfused optimizers alike:
    gradients are always unscaled here, so an optimizer never sees the scale (rule 9).

    Args:
        init_scale: Factor on the loss at the start.
        growth_factor: What the scale is multiplied by after `growth_interval` good windows.
        backoff_factor: What the scale is multiplied by after an overflow.
        growth_interval: Good windows in a row before the scale grows.
        min_scale: Smallest scale. Gradients that still overflow there end the run: below it those
            that do not would be rounded to zero, and updates would only decay the weights.
    """

    name = "fp16"
    dtype = torch.float16

    @checked
    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 2.0**-14,
    ) -> None:
        known = (min_scale, growth_factor - 1, 1 - backoff_factor, backoff_factor, growth_interval)
        fits = min_scale <= init_scale < math.inf
        if not (fits and all(0 < value < math.inf for value in known)):
            raise ConfigError(
                "The loss scale needs `min_scale` above 0, `init_scale` of at least `min_scale`, "
                "`growth_factor` above 1, `backoff_factor` between 0 and 1 and `growth_interval` "
                f"of at least 1, all finite, but they are {min_scale}, {init_scale}, "
                f"{growth_factor}, {backoff_factor} and {growth_interval}."
            )
        self.min_scale = min_scale
        self._options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }

    @override
    def setup(self, device: torch.device) -> None:
        super().setup(device)
        if not has_loss_scaling(device):
            raise ConfigError(
                f'`precision="fp16"` was given, but torch has no gradient scaler for '
                f'`{device.type}`. Use `precision="bf16"` or `"fp32"`.'
            )
        self.scaler = torch.amp.GradScaler(device.type, **self._options)

    @override
    def bind(self, optimizer: Optimizer) -> None:
        # torch copies the scale to where gradients are without waiting for the copy. On the CPU,
        # where an offloaded model has them, it would be read before it has arrived: so it is made
        # there at once.
        groups = optimizer.param_groups
        devices = {p.device for group in groups for p in group["params"] if p.requires_grad}
        if len(devices) == 1 and loss_scale(self.scaler) is None:
            make_loss_scale(self.scaler, *devices)
        kinds = {device.type for device in devices}
        if devices and (scale := loss_scale(self.scaler)) is not None:
            kinds.add(scale.device.type)
        if len(devices) > 1 or len(kinds) > 1:
            raise ConfigError(
                "Trainable parameters are on several devices "
                f"({', '.join(sorted(kinds if len(kinds) > 1 else map(str, devices)))}), and fp16 "
                'has one loss scale for all. Put them on one device, or use `precision="bf16"`.'
            )

    @property
    def scale(self) -> float:
        """The present factor on the loss; reading it waits for the device."""
        return self.scaler.get_scale()

    def is_lowest(self) -> bool:
        """Return whether an overflow that the scale has not followed yet takes it too low."""
        return self.scale * self.scaler.get_backoff_factor() < self.min_scale

    @override
    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.dtype)

    @override
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        scaled = scaled_loss(self.scaler, loss)
        scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    @override
    def unscale(
        self,
        optimizer: Optimizer,
        reduce_overflow: Callable[[Tensor], Tensor],
        *,
        update: bool = True,
    ) -> bool:
        """Unscale gradients; the scale then follows, unless it is to wait for other optimizers."""
        if not any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            return False  # the scaler would wait for an update that cannot come
        self.scaler.unscale_(optimizer)
        # All processes must have the same flag before the scale follows it, and before it does it
        # is the scale that overflowed.
        flag = reduce_overflow(found_inf(self.scaler, optimizer))
        overflowed = flag.item() != 0  # the one read a step that fp16 costs
        self.exhausted = overflowed and self.is_lowest()
        if update:
            self.scaler.update()
        return overflowed

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict(dict(state))


def scaled_loss(scaler: torch.amp.GradScaler, loss: Tensor) -> Tensor:
    """Return the loss times the scale; the scale itself is never copied to the CPU."""
    scale = loss_scale(scaler)
    if scale is not None and scale.is_cpu:
        return loss * scale  # a device takes the number along with the call
    if scale is not None and loss.is_cpu:
        loss = loss.to(scale.device)
    return scaler.scale(loss)
