"""Data parallelism by torch's DistributedDataParallel."""

from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trainkit.distributed import Processes
from trainkit.strategies.strategy import Strategy
from trainkit.world import World

__all__ = ["DDP"]


class DDP(Strategy):
    """Holds the whole model on every process and averages the gradients once a window.

    Args:
        device: Where the model runs; None: the GPU of the local rank (nccl), else the CPU (gloo).
        find_unused_parameters: Set it where a step does not use every parameter; costs a walk
            over the graph each forward.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        static_graph: Tell DDP that every step uses the same parameters in the same way.
    """

    name = "ddp"

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        static_graph: bool = False,
    ) -> None:
        super().__init__(device=device)
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb
        self.static_graph = static_graph

    @override
    def setup(self) -> None:
        self.device = self._choose_device(World.from_env().local_rank)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.processes = Processes.start(device=self.device)

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.processes.size == 1:
            return model
        return DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
            static_graph=self.static_graph,
        )

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            module = model.module
            assert isinstance(module, nn.Module)
            return module
        return model

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return super().no_sync(model)
