"""A metric of the `torchmetrics` library as a metric."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from trainkit.config import checked
from trainkit.metrics.figures import flatten
from trainkit.metrics.metric import Metric
from trainkit.metrics.samples import is_array, matching_length

__all__ = ["TorchMetric"]


class TorchMetric(Metric):
    """Feeds a torchmetrics `Metric` or `MetricCollection` chunk by chunk.

    It keeps the metric from gathering by itself, since every process already feeds it all
    samples. Tensors are moved to the metric's device. What the metric had seen before is lost.

    Args:
        metric: The metric or collection.
        name: Key of the figure where the metric returns a single number; the name of its class
            where not given.
    """

    @checked
    def __init__(self, metric: nn.Module, *, name: str | None = None) -> None:
        self.name = type(metric).__name__ if name is None else name
        self.metric: Any = metric
        self.higher_is_better = _direction(metric)
        self._samples = 0

    @override
    def reset(self) -> None:
        self.metric.reset()
        self._samples = 0

    @override
    def update(self, predictions: Any, references: Any) -> None:
        samples = matching_length(self.name, predictions, references)
        if samples == 0:
            return
        if self._samples == 0:
            self.metric.reset()
        self._samples += samples
        with _unsynchronised(self._parts()):
            self.metric.update(self._placed(predictions), self._placed(references))

    @override
    def compute(self) -> dict[str, float]:
        if self._samples == 0:
            return {}
        with _unsynchronised(self._parts()):
            return flatten(self.name, self.metric.compute())

    def _parts(self) -> list[Any]:
        """Return every metric inside, such as those of a collection or a wrapper."""
        return [part for part in self.metric.modules() if hasattr(part, "distributed_available_fn")]

    def _placed(self, values: Any) -> Any:
        if not is_array(values):
            return values
        parts = self._parts()
        return torch.as_tensor(values, device=parts[0].device if parts else None).detach()


def _direction(metric: Any) -> bool | None:
    """Return `higher_is_better` of a metric, or of a collection whose metrics all say the same."""
    own = getattr(metric, "higher_is_better", None)
    values = getattr(metric, "values", None)
    if own is not None or values is None:
        return own
    said = {_direction(part) for part in values()}
    return said.pop() if len(said) == 1 else None


def _never() -> bool:
    return False


@contextmanager
def _unsynchronised(metrics: list[Any]) -> Iterator[None]:
    before = [metric.distributed_available_fn for metric in metrics]
    try:
        for metric in metrics:
            metric.distributed_available_fn = _never
        yield
    finally:
        for metric, function in zip(metrics, before, strict=True):
            metric.distributed_available_fn = function
