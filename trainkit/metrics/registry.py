"""Metrics by name, and whatever can serve as a metric as one."""

import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from trainkit.basics.packages import require
from trainkit.basics.parsing import nearest
from trainkit.errors import ConfigError
from trainkit.metrics.function_metric import FunctionMetric
from trainkit.metrics.metric import Metric

if TYPE_CHECKING:
    from trainkit.metrics.evaluate_metric import EvaluateMetric
    from trainkit.metrics.local_metric import LocalMetric

# Where the metrics are, so that a program loads those alone that it uses.
_SHIPPED = {
    "accuracy": "trainkit.metrics.accuracy:Accuracy",
    "f1": "trainkit.metrics.class_scores:F1",
    "mae": "trainkit.metrics.regression:MAE",
    "mse": "trainkit.metrics.regression:MSE",
    "perplexity": "trainkit.metrics.perplexity:Perplexity",
    "precision": "trainkit.metrics.class_scores:Precision",
    "recall": "trainkit.metrics.class_scores:Recall",
}
_OF_EVALUATE = "trainkit.metrics.evaluate_metric:EvaluateMetric"
_OF_LIBRARIES = {
    "evaluate": (("EvaluationModule", "CombinedEvaluations"), _OF_EVALUATE),
    "torchmetrics": (
        ("Metric", "MetricCollection"),
        "trainkit.metrics.torch_metric:TorchMetric",
    ),
}
"""Classes of other libraries, and what makes metrics of theirs."""


def load(name: str, **options: Any) -> "LocalMetric | EvaluateMetric":
    """Return the metric of that name.

    Args:
        name: `accuracy`, `f1`, `mae`, `mse`, `perplexity`, `precision` or `recall`, which need
            neither a network nor the `evaluate` library; or what `evaluate.load` knows: a name
            on the hub, or the path of a script.
        options: Those of the metric's class, or of `evaluate.load`.

    Raises:
        ConfigError: There is no metric of that name, or it has no such option.
    """
    if name in _SHIPPED:
        shipped: type[LocalMetric] = resolve_name(_SHIPPED[name])
        return shipped.of(options)
    hint = nearest(name.lower(), _SHIPPED)
    ours = f"There is no metric {name!r}.{hint} trainkit has {sorted(_SHIPPED)}"
    require("evaluate", f"{ours}; for any other name it")
    adapter: type[EvaluateMetric] = resolve_name(_OF_EVALUATE)
    try:
        import evaluate

        return adapter(evaluate.load(name, **options))
    except ConfigError:
        raise
    except Exception as error:  # a missing network shows up as one of many classes
        raise ConfigError(
            f"{ours}; for any other name `evaluate.load` must find it, which failed: {error}"
        ) from error


def as_metric(metric: Any) -> Metric:
    """Return `metric` as a metric.

    Args:
        metric: A metric, a name for `load`, a module of `evaluate`, a metric or collection of
            torchmetrics, or a function `(predictions, references) -> float | dict`.

    Raises:
        ConfigError: It is none of these, or a class where an object is needed.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str):
        return load(metric)
    if isinstance(metric, type):
        raise ConfigError(
            f"A metric must be an object, but is the class `{metric.__name__}`. Make one: "
            f"`{metric.__name__}()`."
        )
    for library, (classes, adapter) in _OF_LIBRARIES.items():
        loaded = sys.modules.get(library)  # whose objects `metric` can be without an import
        known = (getattr(loaded, name, None) for name in classes)
        if isinstance(metric, tuple(cls for cls in known if isinstance(cls, type))):
            made: Metric = resolve_name(adapter)(metric)
            return made
    if callable(metric):
        return FunctionMetric(metric)
    raise ConfigError(
        f"A metric must be a name, a `Metric`, a module of `evaluate`, a metric of torchmetrics or "
        f"a function of predictions and references, but is {metric!r}."
    )
