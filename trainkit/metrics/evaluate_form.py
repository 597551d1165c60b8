"""Our own metrics as modules of the `evaluate` library."""

from typing import Any

from trainkit.metrics.accuracy import Accuracy
from trainkit.metrics.class_scores import ClassScore
from trainkit.metrics.local_metric import LocalMetric

__all__ = ["evaluate_form"]


def evaluate_form(metric: LocalMetric) -> Any:
    """Return `metric` as an `evaluate.Metric`, needing no network.

    Its options are those of `metric`, unless `compute` is given others.
    """
    import datasets
    import evaluate

    def inputs(feature: Any) -> Any:
        return datasets.Features({"predictions": feature, "references": feature})

    if isinstance(metric, Accuracy | ClassScore):
        features = inputs(datasets.Value("int64"))
    else:
        number = datasets.Value("float64")
        features = [inputs(number), inputs(datasets.Sequence(number))]

    class Form(evaluate.Metric):  # type: ignore[misc]  # `evaluate` has no types
        def _info(self) -> Any:
            return evaluate.MetricInfo(
                description=type(metric).__doc__ or "",
                citation="",
                inputs_description=type(metric).compute.__doc__ or "",
                features=features,
            )

        def _compute(self, **inputs: Any) -> dict[str, Any]:
            return metric.compute(**inputs)

    Form.__name__ = type(metric).__name__  # the module is named after its class
    # In memory, since all processes of a machine would compete for one cache file.
    return Form(keep_in_memory=True)
