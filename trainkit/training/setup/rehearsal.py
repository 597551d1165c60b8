"""One batch of each evaluation, before the first step: what cannot work is said at once."""

import warnings
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

from typing_extensions import override

from trainkit.errors import TrainkitError
from trainkit.metrics.metric import Metric
from trainkit.training.run import Run
from trainkit.training.unchanged import kept
from trainkit.types import Scalars


def rehearse(run: Run) -> Collection[str] | None:
    """Evaluate one batch of each loader and forget it; return the names of the metrics.

    So what cannot work, such as metrics that do not fit the outputs, is said before the first
    step. The names are None where they are not known: a metric of others may refuse so little
    data, and a loader that can be read only once is left alone.
    """
    evaluation, step = run.evaluation, run.evaluation.evaluator.step
    metrics = [_Rehearsed(metric) for metric in evaluation.metrics]
    values: Scalars = {}
    owner = getattr(step, "__self__", None)  # the trainer
    for name, loader in evaluation.loaders.items():
        data = getattr(loader.source, "dataset", None)
        if isinstance(loader.source, Iterator) or isinstance(data, Iterator):
            return None
        with kept(run.module, owner, *evaluation.metrics), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about so little data
            values |= evaluation.evaluator.evaluate(
                run.module, loader, metrics, name, lambda batches: islice(batches, 1)
            )
    evaluation.learn(metrics, values)
    return None if any(metric.refused for metric in metrics) else values.keys()


class _Rehearsed(Metric):
    """A metric that may refuse to compute, unless it is our own error that says why.

    Attributes:
        refused: Whether the names of its metrics remain unknown.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.name = metric.name
        self.uses = metric.uses
        self.higher_is_better = metric.higher_is_better
        self.refused = False

    @override
    def reset(self) -> None:
        self.metric.reset()

    @override
    def update(self, predictions: Any, references: Any) -> None:
        self.metric.convention = self.convention
        self.metric.update(predictions, references)

    @override
    def compute(self) -> dict[str, float]:
        try:
            values = self.metric.compute()
        except TrainkitError:
            raise
        except Exception:
            self.refused = True
            return {}
        # Values for each class are those of the classes in this one batch, which may hold nothing
        # that counts, such as ignored labels alone.
        self.refused |= not values
        self.refused |= self.metric.keys is None and any("/" in name for name in values)
        return values
