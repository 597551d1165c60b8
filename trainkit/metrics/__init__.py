"""One face for metrics of trainkit, `evaluate` and torchmetrics, and for plain functions."""

from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.metrics.accuracy import Accuracy as Accuracy
    from trainkit.metrics.class_scores import F1 as F1, Precision as Precision, Recall as Recall
    from trainkit.metrics.evaluate_metric import (
        EvaluateMetric as EvaluateMetric,
        as_evaluate as as_evaluate,
    )
    from trainkit.metrics.function_metric import FunctionMetric as FunctionMetric, scores as scores
    from trainkit.metrics.local_metric import LocalMetric as LocalMetric
    from trainkit.metrics.metric import Metric as Metric
    from trainkit.metrics.perplexity import Perplexity as Perplexity
    from trainkit.metrics.registry import as_metric as as_metric, load as load
    from trainkit.metrics.regression import MAE as MAE, MSE as MSE
    from trainkit.metrics.torch_metric import TorchMetric as TorchMetric

__all__, __getattr__, __dir__ = lazy_exports(__name__)
