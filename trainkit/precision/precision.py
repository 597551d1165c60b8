"""The interface of precision plugins, and those that scale no loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from trainkit.basics.device import lacks_bf16
from trainkit.errors import ConfigError
from trainkit.types import NOTHING


class Precision(ABC):
    """Decides the number format of forward, backward and update.

    Only `autocast` must be written; everything else does what plain fp32 training does.
    """

    name: ClassVar[str]
    dtype: ClassVar[torch.dtype | None] = None
    """What parameters may be converted to for a forward; None: they stay what they are."""
    device: torch.device
    exhausted: bool = False
    """Whether the latest overflow came where the loss cannot be scaled down any further."""

    @property
    def described(self) -> str:
        """The name, with what else a checkpoint must have been trained by."""
        return self.name

    def setup(self, device: torch.device) -> None:
        """Bind to the device; raises `ConfigError` where it lacks the format."""
        self.device = device

    def bind(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer, whose parameters are now where they are updated.

        Called for each one before any state is loaded and before the first backward. Parameters,
        and so gradients, may lie elsewhere than the device of `setup`.
        """

    def convert(self, model: nn.Module) -> Callable[[], object]:
        """Let parts of a model compute in another way from now on; return what undoes that.

        Called before each training or evaluation, one inside of it too; all parts and names stay.
        """
        return lambda: None

    @abstractmethod
    def autocast(self) -> AbstractContextManager[object]:
        """Return the context that the step, model and loss, runs in."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Accumulate the gradients of `loss`.

        Args:
            loss: A scalar.
            retain_graph: Given only where another backward may go through the same graph, as
                where a step gives losses to several optimizers.
        """
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: Optimizer, reduce_overflow: Callable[[Tensor], Tensor]) -> bool:
        """Bring the gradients to their true scale; return whether they overflowed anywhere.

        Args:
            optimizer: The optimizer whose gradients are meant.
            reduce_overflow: Takes a float tensor, 1.0 where this process overflowed, and makes
                it, in place, the maximum over all processes.
        """
        return False

    def step(self, optimizer: Optimizer) -> None:
        """Apply the update; the gradients are final. Not called where a step is skipped."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        if state:
            raise ConfigError(
                f"Precision `{self.name}` has no state, but was given {sorted(state)}. "
                "Resume with the precision that the state was saved with."
            )


class FP32(Precision):
    """Runs the model in the dtype of its parameters."""

    name = "fp32"

    @override
    def autocast(self) -> AbstractContextManager[object]:
        return NOTHING


class BF16(Precision):
    """Runs matrix products in bfloat16; its range is that of fp32, so no loss is scaled."""

    name = "bf16"
    dtype = torch.bfloat16

    @override
    def setup(self, device: torch.device) -> None:
        super().setup(device)
        if lacks_bf16(device):
            raise ConfigError(
                f'`precision="{self.name}"` was given, but this `{device.type}` device has no '
                'bfloat16. Use `precision="fp16"` or `"fp32"`.'
            )
        if not torch.amp.is_autocast_available(device.type):
            raise ConfigError(
                f"`{self.name}` was given, but torch has no autocast for `{device.type}`. "
                'Use `precision="fp32"`.'
            )

    @override
    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=self.dtype)
