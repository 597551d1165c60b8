"""One process, one device."""

from torch import nn
from typing_extensions import override

from trainkit.distributed.world import World
from trainkit.errors import ConfigError
from trainkit.precision import Precision
from trainkit.strategies.strategy import Strategy

__all__ = ["SingleDevice"]


class SingleDevice(Strategy):
    """Trains on one device; the model is used as it is."""

    name = "single"

    @override
    def setup(self) -> None:
        size = World.from_env().size
        if size > 1:
            raise ConfigError(
                f'`strategy="single"` was given, but {size} processes were launched: each '
                'would train alone on all the data. Use `strategy="ddp"` (or `"auto"`), or start '
                "one process."
            )
        super().setup()

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        self.check_whole(model)
        return self.to_device(model)
