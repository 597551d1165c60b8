"""float16 under autocast, with a loss scale that adapts itself and skips a step on overflow."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.errors import ConfigError
from trainkit.precision.precision import Precision

__all__ = ["FP16"]


class FP16(Precision):
    """Runs matrix products in float16 and scales the loss so that small gradients survive.

    An overflow is read from the scaler's `found_inf`, for fused and unfused optimizers alike:
    gradients are always unscaled here, so an optimizer never sees the scale (DESIGN 2.9).

    Args:
        init_scale: Factor on the loss at the start.
        growth_factor: What the scale is multiplied by after `growth_interval` good windows.
        backoff_factor: What the scale is multiplied by after an overflow.
        growth_interval: Good windows in a row before the scale grows.
    """

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self._options: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }

    @override
    def setup(self, device: torch.device) -> None:
        super().setup(device)
        if device.type not in ("cpu", "cuda", "xpu"):
            raise ConfigError(
                f'`precision="fp16"` was given, but torch has no gradient scaler for '
                f'`{device.type}`. Use `precision="bf16"` or `"fp32"`.'
            )
        self.scaler = torch.amp.GradScaler(device.type, **self._options)

    @property
    def scale(self) -> float:
        """The present factor on the loss; reading it waits for the device."""
        return self.scaler.get_scale()

    @override
    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.dtype)

    @override
    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    @override
    def unscale(self, optimizer: Optimizer, agree: Callable[[Tensor], Tensor]) -> bool:
        if not any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
            return False  # the scaler would wait for an update that cannot come
        self.scaler.unscale_(optimizer)
        # torch has no public name for the flag that GradScaler.step reads.
        (found,) = self.scaler._found_inf_per_device(optimizer).values()
        overflow = agree(found)
        self.scaler.update()
        return overflow.item() != 0  # the one read a step that fp16 costs

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict(dict(state))
