"""Data parallelism by torch's DistributedDataParallel."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
import torch.distributed
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trainkit.config import checked
from trainkit.distributed import Processes
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies.strategy import Strategy
from trainkit.types import class_name

__all__ = ["DDP", "Reduction"]

Reduction: TypeAlias = Callable[[Processes, GradBucket], torch.futures.Future[Tensor]]


class DDP(Strategy):
    """Holds the whole model on every process and averages the gradients once a window.

    Args:
        device: Where the model runs; None: the accelerator of the local rank, else the CPU.
        find_unused_parameters: Set it where a step does not use every parameter; costs a walk
            over the graph each forward.
        bucket_cap_mb: Size of a gradient bucket in MiB.
    """

    name = "ddp"

    @checked
    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(device=device)
        if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
            raise ConfigError(
                f"`bucket_cap_mb` must be a positive number of MiB, but is {bucket_cap_mb}."
            )
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        self.check_whole(model)
        model = self.to_device(model)
        if self.processes.size == 1:
            return model
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if self.device.type == "cpu" else [self.device],
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        reduction = self.reduction()
        if reduction is not None:
            _check_dense(model)
            wrapped.register_comm_hook(self.processes, reduction)
        return wrapped

    @override
    def rebuild_after_freeze(self, model: nn.Module, precision: Precision) -> nn.Module:
        # The reducer waits for the gradients of those parameters that it found when it was made.
        if isinstance(model, DistributedDataParallel):
            # Else the old one would go on taking gradients.
            model._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        return self.wrap(self.unwrap(model), precision)

    def reduction(self) -> Reduction | None:
        """Return how a bucket of gradients is averaged over processes; None: as torch does it.

        For subclasses: a communication hook of DistributedDataParallel, whose state are the
        processes. It has only one, so pass yours here, not to `register_comm_hook`. A resume is
        exact only if it does not depend on how buckets are laid out.
        """
        return _mean_in_rank_order if self.processes.size > 2 else None

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            module = model.module
            assert isinstance(module, nn.Module)
            return module
        return model

    @override
    def check_gradients(self, module: nn.Module) -> None:
        if self.processes.size == 1 or self.find_unused_parameters:
            return
        names = sorted({name for own in self._without_gradient(module) for name in own})
        if names:
            raise ConfigError(
                f"{len(names)} trainable parameters got no gradient in the first step "
                f"({quoted(names)}), so the gradients of the processes would not "
                "be averaged. Freeze what the step does not use by `requires_grad_(False)`, or "
                "pass `strategy=DDP(find_unused_parameters=True)`."
            )

    @override
    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        if isinstance(model, DistributedDataParallel):
            return model.no_sync()
        return super().no_sync(model)


def _check_dense(model: nn.Module) -> None:
    """Raise where a module has sparse gradients, which no communication hook can take."""
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"`{name or class_name(model)}` has sparse gradients, which 3 processes or more, "
                "or a `reduction` of your own, cannot average. Pass `sparse=False` to it."
            )


def _mean_in_rank_order(processes: Processes, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket so that each element is summed in the order of the ranks.

    A ring all-reduce sums in an order that depends on where an element lies in its bucket, and
    DDP lays its buckets out anew after the first backward: a resumed run would differ from one
    that was never stopped in the last bit (rule 30). The sum of two is the same either way.
    """
    tensor, size = bucket.buffer(), processes.size
    share = -(-tensor.numel() // size)
    sent = nn.functional.pad(tensor, (0, share * size - tensor.numel()))
    received = torch.empty_like(sent)
    torch.distributed.all_to_all_single(received, sent)
    parts = received.view(size, share)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    total = total / size
    torch.distributed.all_gather(list(sent.view(size, share).unbind()), total)
    tensor.copy_(sent[: tensor.numel()])
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
