"""Rule 6: each item counts the same, however a step is split (rule 6).

The applied gradient is `sum(weight * grad loss) / sum(weight)` over all processes and
micro-batches of a window. Each loss is multiplied by one factor before backward, so that the
average that the strategy takes over processes gives that sum; where the total of weights is not
known ahead, the reduced gradients are multiplied once more at the end of the window.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from trainkit.data import MicroBatch, Window
from trainkit.device import wide_dtype
from trainkit.distributed import Processes
from trainkit.distributed.collectives import require_equal
from trainkit.errors import ConfigError, DataError, named
from trainkit.types import StepOutput

__all__ = ["Weighting", "check_loss", "loss_of", "on_device", "parse", "scalar"]


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
        self._losses: list[tuple[Tensor, Tensor | float]] = []
        self._window_total: float | None = None
        self._size: int | None = None
        self._total: Tensor | None = None  # sum of the weights that the step returned, here
        self._alone: bool | None = None  # one micro-batch on one process: never scaled
        self._by_sample: bool | None = None  # None: no micro-batch was seen

    def begin(self, window: Window) -> None:
        """Start a window."""
        self._window_total = window.total
        self._size = window.size
        self.samples = 0
        self._total = self._alone = None
        self._losses = []

    def weigh(self, output: object, micro_batch: MicroBatch) -> Tensor:
        """Return the loss to run backward on, for what the training step returned."""
        loss, weight = parse(output)
        if self._by_sample is None:
            self._by_sample = self._agree(loss, weight)
        if loss.ndim:
            loss = scalar(loss)
        if self._alone is None:
            self._alone = self._processes.size == 1 and micro_batch.last
        count = micro_batch.count
        self.samples += micro_batch.total
        if not self._by_sample:
            return self._by_weight(loss, count if weight is None else weight, count)
        if weight is not None:
            raise DataError(
                "`training_step` returned a weight, after it had returned none for the first "
                "micro-batch of the run. Return one always, or never."
            )
        self._losses.append((loss.detach(), count))
        if self._alone:
            return loss
        factor = count * self._processes.size / self._base(micro_batch)
        return loss if factor == 1 else loss * factor

    def correction(self) -> Tensor | float | None:
        """Return what the reduced gradients must be multiplied by, None for nothing.

        Every process must call it once a window: it sums the weights that steps returned.
        """
        if self._alone:
            return None
        if self._total is not None:
            total = self._processes.all_reduce(self._total.clone())
            scale = (self.reference or 1.0) / total
            return torch.where(total > 0, scale, torch.zeros_like(scale))
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

    def is_finite(self) -> bool:
        """Return whether the latest loss of this process is finite; reads the device."""
        if not self._losses:
            return True  # no window yet
        loss, weight = self.result()
        return bool(torch.isfinite(loss)) or float(weight) == 0

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

    def _by_weight(self, loss: Tensor, given: Tensor | float, count: int) -> Tensor:
        weight = on_device(given, loss)
        if count == 0:
            weight = torch.zeros_like(weight)
        self._losses.append((loss.detach(), weight))
        # A mean over no items is NaN; it must not reach the sum.
        if self._alone:
            return torch.where(weight > 0, loss, torch.zeros_like(loss))
        self._total = weight if self._total is None else self._total + weight
        if self.reference is None:
            self._set_reference(weight)
        factor = weight * (self._processes.size / (self.reference or 1.0))
        return torch.where(weight > 0, loss * factor.to(loss.dtype), torch.zeros_like(loss))

    def _set_reference(self, weight: Tensor) -> None:
        """Estimate a window's total from the first micro-batch that has any weight.

        Once in a run the host reads it, so that every later window divides by a known number.
        """
        total = self._processes.all_reduce(weight.clone()).item()
        if total > 0:
            self.reference = total * (self._size or self._accumulation)

    def _agree(self, loss: Tensor, weight: Tensor | float | None) -> bool:
        """Return whether the run weighs by samples, once all processes said the same."""
        check_loss(loss, weight)
        require_equal(self._processes, weight is None, _weights_on_some)
        return weight is None


def _weights_on_some(without: Sequence[bool]) -> DataError:
    ranks = [rank for rank, none in enumerate(without) if not none]
    return DataError(
        f"`training_step` returned a weight on {named(ranks)} of {len(without)} only. Return one "
        "on all, or on none."
    )


def loss_of(output: object) -> Tensor:
    """Return the loss in what a training step returned; of several loaders their sum."""
    if isinstance(output, Mapping) and output and "loss" not in output:
        return torch.stack([scalar(parse(each)[0]) for each in output.values()]).sum()
    return parse(output)[0]


def parse(output: object) -> tuple[Tensor, Tensor | float | None]:
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


def check_loss(loss: object, weight: Tensor | float | None) -> None:
    """Raise where a training step must not return a loss, or its weight; reads the device."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"The loss must be a tensor with a graph, but is {type(loss).__name__!r}. Return what "
            "the loss function gives, not `loss.item()`."
        )
    scalar(loss)
    if not loss.requires_grad:
        raise ConfigError(
            "The loss has no graph: nothing that it was computed from requires a gradient. "
            "Return the loss itself, not `loss.detach()` or `loss.item()`, and compute it "
            "outside `torch.no_grad()`; in a turn of an optimizer, from its own parameters."
        )
    if weight is None:
        return
    if not isinstance(weight, Tensor | Real):
        raise DataError(
            f"`weight` must be a number or a tensor of one, but is {type(weight).__name__!r}. It "
            "is the number of items that the loss averages."
        )
    value = float(on_device(weight, loss))
    if not (math.isfinite(value) and value >= 0):
        raise DataError(
            f"`weight` must be a finite number of at least 0, but `training_step` returned "
            f"{value}. It is the number of items that the loss averages."
        )


def scalar(loss: Tensor) -> Tensor:
    """Return a loss of one element without dimensions."""
    if loss.numel() != 1:
        raise ConfigError(
            f"The loss must be a scalar, but `training_step` returned the shape "
            f"{tuple(loss.shape)}. Return its mean, for example `loss.mean()`."
        )
    return loss.reshape(())


def on_device(weight: Tensor | float, loss: Tensor) -> Tensor:
    """Return a weight as a scalar of wide type beside the loss; numbers are not copied over."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise DataError(
                "`weight` must be one number, the items that the loss averages, but "
                f"`training_step` returned the shape {tuple(weight.shape)}. Return its sum, with "
                "the loss as the mean weighted by it."
            )
        return weight.detach().to(loss.device, wide_dtype(loss.device.type)).reshape(())
    return torch.full((), weight, dtype=wide_dtype(loss.device.type), device=loss.device)


def _times(loss: Tensor, weight: Tensor | float) -> Tensor:
    """Return `loss * weight`, and 0 for a mean over no items, which is NaN."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))
    return loss * weight if weight else torch.zeros_like(loss)
