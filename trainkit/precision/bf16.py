"""bfloat16 under autocast, with parameters, gradients and updates in fp32."""

from contextlib import AbstractContextManager

import torch
from typing_extensions import override

from trainkit.basics.device import lacks_bf16
from trainkit.errors import ConfigError
from trainkit.precision.precision import Precision

__all__ = ["BF16"]


class BF16(Precision):
    """Runs matrix products in bfloat16; its range is that of fp32, so no loss is scaled."""

    name = "bf16"
    dtype = torch.bfloat16

    @override
    def setup(self, device: torch.device) -> None:
        super().setup(device)
        if lacks_bf16(device):
            raise ConfigError(
                f'`precision="bf16"` was given, but this `{device.type}` device has no '
                'bfloat16. Use `precision="fp16"` or `"fp32"`.'
            )
        if not torch.amp.is_autocast_available(device.type):
            raise ConfigError(
                f'`precision="bf16"` was given, but torch has no autocast for `{device.type}`. '
                'Use `precision="fp32"`.'
            )

    @override
    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.dtype)
