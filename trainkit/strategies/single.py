"""One process, one device."""

import torch
from torch import nn
from typing_extensions import override

from trainkit.distributed import Processes
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
        world = World.from_env()
        if world.size > 1:
            raise ConfigError(
                f'`strategy="single"` was given, but {world.size} processes were launched: each '
                'would train alone on all the data. Use `strategy="ddp"` (or `"auto"`), or start '
                "one process."
            )
        self.device = self._choose_device(world.local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.processes = Processes.start(device=self.device)

    @override
    def wrap(self, model: nn.Module, precision: Precision) -> nn.Module:
        self.check_whole(model)
        return self.place(model)
