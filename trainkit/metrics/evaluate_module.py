"""Our own metrics as modules of the `evaluate` library; importing that takes seconds."""

from typing import Any

from trainkit.metrics.local_metric import LocalMetric
from trainkit.packages import require

__all__ = ["as_evaluate"]


def as_evaluate(metric: LocalMetric) -> Any:
    """Return `metric` as an `evaluate.Metric`, needing no network.

    Its options are those of `metric`, unless `compute` is given others.
    """
    require("evaluate", "`as_evaluate`")
    import datasets
    import evaluate

    def inputs(feature: Any) -> Any:
        return datasets.Features({"predictions": feature, "references": feature})

    value = datasets.Value(metric.evaluate_dtype)
    features = inputs(value)
    if metric.evaluate_dtype == "float64":
        features = [features, inputs(datasets.Sequence(value))]

    class EvaluateModule(evaluate.Metric):  # type: ignore[misc]  # `evaluate` has no types
        def _info(self) -> Any:
            return evaluate.MetricInfo(
                description=type(metric).__doc__ or "",
                citation="",
                inputs_description=type(metric).compute.__doc__ or "",
                features=features,
            )

        def _compute(self, **inputs: Any) -> dict[str, Any]:
            return metric.compute(**inputs)

    EvaluateModule.__name__ = type(metric).__name__  # the module is named after its class
    # In memory, since all processes of a machine would compete for one cache file.
    return EvaluateModule(keep_in_memory=True)
