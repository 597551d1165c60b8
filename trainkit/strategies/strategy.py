"""The interface of strategies."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn

from trainkit.distributed import Processes
from trainkit.errors import ConfigError

__all__ = ["Strategy"]

_NOTHING: AbstractContextManager[object] = nullcontext()


class Strategy(ABC):
    """Places and wraps the model, and decides when gradients are reduced.

    `setup` must set `device` and `processes`; only `setup` and `wrap` must be written. The
    defaults are right wherever every process holds all parameters.

    Args:
        device: Where the model runs; None: the GPU of this process's local rank, else the CPU.
    """

    name: ClassVar[str]
    device: torch.device
    processes: Processes

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        self._asked_device = None if device is None else torch.device(device)

    @abstractmethod
    def setup(self) -> None:
        """Find the device and join the other processes. Called once, before anything else."""

    @abstractmethod
    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to the device and return what the training step calls."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module behind what `wrap` returned."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward accumulates without reducing over processes."""
        return _NOTHING

    def check_gradients(self, module: nn.Module) -> None:
        """Raise, on all processes, if the first backward left gradients unreduced."""

    def share_buffers(self, module: nn.Module) -> None:
        """Give every process the buffers of process 0, such as batch statistics.

        Called before an evaluation and at the end of training: what is evaluated and saved is
        one model.
        """

    def agree(self, overflow: Tensor) -> Tensor:
        """Make `overflow` the maximum over all processes, in place.

        Nothing is to be done where every process holds the same reduced gradients.
        """
        return overflow

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip the global L2 norm of the gradients; return the norm before, on the device."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def clip_grad_value(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Clip every element of the gradients to [-max_value, max_value]."""
        nn.utils.clip_grad_value_(parameters, max_value)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the global L2 norm of the gradients, on the device, without changing them."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def close(self) -> None:
        """Give back what `setup` took."""
        self.processes.close()

    def _choose_device(self, local_rank: int) -> torch.device:
        if self._asked_device is not None:
            return self._asked_device
        if not torch.cuda.is_available():
            return torch.device("cpu")
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"Process with local rank {local_rank} has no GPU: the machine shows "
                f"{torch.cuda.device_count()}. Start at most one process for each GPU, or pass "
                f'`strategy={type(self).__name__}(device="cpu")`.'
            )
        return torch.device("cuda", local_rank)
