"""One face for metrics of trainkit, `evaluate` and torchmetrics, and for plain functions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.metrics.accuracy import Accuracy
    from trainkit.metrics.class_scores import F1, Precision, Recall
    from trainkit.metrics.evaluate_metric import EvaluateMetric
    from trainkit.metrics.function_metric import FunctionMetric, scores
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
    "scores",
]

_HOME = {
    "F1": "class_scores",
    "MAE": "regression",
    "MSE": "regression",
    "Accuracy": "accuracy",
    "EvaluateMetric": "evaluate_metric",
    "FunctionMetric": "function_metric",
    "LocalMetric": "local_metric",
    "Metric": "metric",
    "Perplexity": "perplexity",
    "Precision": "class_scores",
    "Recall": "class_scores",
    "TorchMetric": "torch_metric",
    "as_metric": "registry",
    "load": "registry",
    "scores": "function_metric",
}


def __getattr__(name: str) -> Any:
    """Import a metric when it is first asked for: most runs need one or two of them."""
    if name not in _HOME:
        raise AttributeError(f"module `trainkit.metrics` has no attribute {name!r}")
    return getattr(import_module(f"trainkit.metrics.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
