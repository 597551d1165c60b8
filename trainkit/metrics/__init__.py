"""One face for metrics of trainkit, `evaluate` and torchmetrics, and for plain functions."""

from trainkit.metrics.accuracy import Accuracy
from trainkit.metrics.class_scores import F1, Precision, Recall
from trainkit.metrics.evaluate_metric import EvaluateMetric
from trainkit.metrics.function_metric import FunctionMetric
from trainkit.metrics.local_metric import LocalMetric
from trainkit.metrics.metric import Metric
from trainkit.metrics.perplexity import Perplexity
from trainkit.metrics.registry import as_metric, load
from trainkit.metrics.regression import MAE, MSE
from trainkit.metrics.torch_metric import TorchMetric

__all__ = [
    "F1",
    "MAE",
    "MSE",
    "Accuracy",
    "EvaluateMetric",
    "FunctionMetric",
    "LocalMetric",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "TorchMetric",
    "as_metric",
    "load",
]
