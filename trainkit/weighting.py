"""Rule 6: each item counts the same, however a step is split (DESIGN 2.6).

The applied gradient is `sum(weight * grad loss) / sum(weight)` over all processes and
micro-batches of a window. Each loss is multiplied by one factor before backward, so that the
average that the strategy takes over processes gives that sum; where the total of weights is not
known ahead, the reduced gradients are multiplied once more at the end of the window.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainkit.data import MicroBatch, Window
from trainkit.distributed import Processes
from trainkit.errors import ConfigError, DataError
from trainkit.types import StepOutput

__all__ = ["Weighting", "scale_gradients"]


class Weighting:
    """Weighs the losses of a window.

    Args:
        processes: The processes that share a window.
        nominal: Samples of a full window, where known; the reference for streams.
        accumulation: Micro-batches of one process in a full window.

    Attributes:
        samples: Real samples of the window so far, over all processes.
        reference: T0 of rule 6: the total weight that losses are divided by before backward,
            where the window's own total is not known ahead. It is set once in a run, so that
            fp16 sees losses of ordinary size.
    """

    def __init__(self, processes: Processes, *, nominal: int | None, accumulation: int) -> None:
        self.reference: float | None = None
        self.samples = 0
        self._processes = processes
        self._nominal = nominal
        self._accumulation = accumulation
        self._checked = False

    def begin(self, window: Window) -> None:
        """Start a window."""
        self._window_total = window.total
        self._size = window.size
        self.samples = 0
        self._total: Tensor | None = None  # sum of the weights that the step returned, here
        self._alone: bool | None = None  # one micro-batch on one process: never scaled
        self._losses: list[tuple[Tensor, Tensor | float]] = []

    def weigh(self, output: object, micro_batch: MicroBatch) -> Tensor:
        """Return the loss to run backward on, for what the training step returned."""
        loss, weight = _parse(output)
        if not self._checked:
            _check(loss, weight)
            self._checked = True
        if self._alone is None:
            self._alone = self._processes.size == 1 and micro_batch.last
        count = micro_batch.count
        self.samples += micro_batch.total
        self._losses.append((loss.detach(), count if weight is None or count == 0 else weight))
        if self._alone:
            return loss
        if weight is None:
            factor = count * self._processes.size / self._base(micro_batch)
            return loss if factor == 1 else loss * factor
        return self._by_weight(loss, weight, count)

    def correction(self) -> Tensor | float | None:
        """Return what the reduced gradients must be multiplied by, None for nothing.

        Every process must call it once a window: it sums the weights that steps returned.
        """
        if self._alone:
            return None
        if self._total is not None:
            if self._processes.size > 1:
                self._processes.all_reduce(self._total)
            assert self.reference is not None
            scale = self.reference / self._total
            return torch.where(self._total > 0, scale, torch.zeros_like(scale))
        if self._window_total is None and self.samples != self._base(None):
            return self._base(None) / self.samples
        return None

    def result(self) -> tuple[Tensor, Tensor | float]:
        """Return this process's mean loss over the window, on the device, and its weight."""
        if len(self._losses) == 1:
            return self._losses[0]
        weight: Tensor | float = sum((weight for _, weight in self._losses), 0.0)
        if not isinstance(weight, Tensor) and weight == 0:
            return self._losses[-1][0], 0
        losses = [_times(loss, weight) for loss, weight in self._losses]
        return torch.stack(losses).sum() / weight, weight

    def _base(self, micro_batch: MicroBatch | None) -> float:
        """Return the total that sample weights are divided by before backward."""
        if self._window_total is not None:
            return self._window_total
        if self._nominal is not None:
            return self._nominal
        if self.reference is None:
            assert micro_batch is not None
            self.reference = float(micro_batch.total * self._accumulation)
        return self.reference

    def _by_weight(self, loss: Tensor, weight: Tensor | float, count: int) -> Tensor:
        weight = torch.as_tensor(weight, device=loss.device).detach().double().reshape(())
        if count == 0:
            weight = torch.zeros_like(weight)
        self._total = weight if self._total is None else self._total + weight
        if self.reference is None:
            # Once in a run: read on the host, so that every later window divides by a number.
            total = self._processes.all_reduce(weight.clone()).item()
            self.reference = max(1.0, total * (self._size or self._accumulation))
        factor = (weight * (self._processes.size / self.reference)).to(loss.dtype)
        # A mean over no items is NaN; it must add nothing instead of spoiling the window.
        return torch.where(weight > 0, loss * factor, torch.zeros_like(loss))


def _parse(output: object) -> tuple[Tensor, Tensor | float | None]:
    """Take apart what a training step returned."""
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, StepOutput):
        return output.loss, output.weight
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            return loss, output.get("weight")
    raise ConfigError(
        "`training_step` must return the loss as a tensor, a mapping with the tensor `loss`, or "
        f"`StepOutput(loss, weight)`, but returned {_describe(output)}. For a model that computes "
        "no loss by itself, pass `loss_fn` to `fit` or override `training_step`."
    )


def _describe(output: object) -> str:
    if isinstance(output, Mapping):
        return f"a mapping with the keys {sorted(map(str, output))}"
    return f"{type(output).__name__!r}"


def _check(loss: object, weight: object) -> None:
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"The loss must be a tensor with a graph, but is {type(loss).__name__!r}. Return what "
            "the loss function gives, not `loss.item()`."
        )
    if loss.numel() != 1:
        raise ConfigError(
            f"The loss must be a scalar, but `training_step` returned the shape "
            f"{tuple(loss.shape)}. Return its mean, for example `loss.mean()`."
        )
    if not loss.requires_grad:
        raise ConfigError(
            "The loss has no graph: nothing that it was computed from requires a gradient. "
            "Return the loss itself, not `loss.detach()` or `loss.item()`, and compute it "
            "outside `torch.no_grad()`."
        )
    if isinstance(weight, int | float) and not weight >= 0:
        raise DataError(f"`weight` must be at least 0, but `training_step` returned {weight}.")


def _times(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Return `loss * weight`, and 0 for a mean over no items, which is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))
    return loss * weight if weight else torch.zeros_like(loss)


def scale_gradients(parameters: Iterable[Tensor], scale: Tensor | float) -> None:
    """Multiply all gradients by one number, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if isinstance(scale, Tensor):
        for device_gradients in _by_dtype(gradients):
            torch._foreach_mul_(device_gradients, scale.to(device_gradients[0].dtype))
    elif gradients:
        torch._foreach_mul_(gradients, scale)


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
