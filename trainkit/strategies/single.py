"""One process, one device."""

import torch
from torch import nn
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.distributed.group import on_its_own
from trainkit.distributed.processes import Processes
from trainkit.distributed.world import World
from trainkit.errors import ConfigError
from trainkit.precision import Precision
from trainkit.strategies.strategy import Strategy


class SingleDevice(Strategy):
    """Trains on one device; the model is used as it is.

    Args:
        device: As of every strategy.
        alone: Each of several processes trains by itself, on all that it is given, and is the main
            process of its own run: for members of an ensemble, or clients of a federation. Each
            needs an `output_dir` of its own. What they exchange between their fits is the user's.
    """

    name = "single"

    @checked
    def __init__(self, *, device: torch.device | str | None = None, alone: bool = False) -> None:
        super().__init__(device=device)
        self.alone = alone

    @override
    def setup(self) -> None:
        size = World.from_env().size
        if self.alone:
            self.device = self._default_device()
            self.processes = Processes(on_its_own(), self.device)
            return
        if size > 1:
            raise ConfigError(
                f'`strategy="single"` was given, but {size} processes were launched: each '
                'would train alone on all the data. Use `strategy="ddp"` (or `"auto"`), or start '
                "one process. Where each is to train by itself, as members of an ensemble do, pass "
                "`strategy=SingleDevice(alone=True)` and an `output_dir` for each."
            )
        super().setup()

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        self.check_whole(model)
        return self.to_device(model)
