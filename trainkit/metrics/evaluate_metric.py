"""A module of the `evaluate` library as a metric."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.packages import require
from trainkit.containers.tree import is_array
from trainkit.errors import ConfigError, DataError
from trainkit.metrics.collecting import CollectingMetric
from trainkit.metrics.local_metric import LocalMetric
from trainkit.metrics.metric import Uses, agreed, flatten, setting


class EvaluateMetric(CollectingMetric):
    """Calls the module's `compute` once, with all samples, in memory.

    It uses scores where the module asks for floating numbers, else predictions.

    Args:
        module: What `evaluate.load` or `evaluate.combine` returned. Its first input other than
            `references` gets the predictions.
        name: What error texts call the metric; the module's own name where not given.
        options: Passed on to the module's `compute`, such as `average="macro"`.

    Raises:
        ConfigError: The module is set up to gather from several processes itself, or combines
            what wants scores with what wants classes.
    """

    @checked
    def __init__(self, module: Any, *, name: str | None = None, **options: Any) -> None:
        self._parts: list[Any] = getattr(module, "evaluation_modules", [module])
        super().__init__("+".join(str(part.name) for part in self._parts) if name is None else name)
        for part in self._parts:
            if part.num_process != 1:
                raise ConfigError(
                    f"The metric `{self.name}` has `num_process={part.num_process}`, but must have "
                    "1: every process gets all samples. Load it without `num_process`."
                )
        self.uses = agreed(self.name, map(_uses, self._parts))
        self.module = module
        self._options = options

    @override
    def compute(self, *, predictions: Any = None, references: Any = None, **options: Any) -> Any:
        """Return the values over what was seen, or the module's own result for given data.

        Args:
            predictions: If given, nothing else is looked at.
            references: The true values that belong to `predictions`.
            options: Passed on to the module's `compute`, before those of the constructor.
        """
        if predictions is not None or references is not None:
            return self._ask(predictions, references, options)
        if options:
            raise ConfigError(
                f"`compute` of `{self.name}` got {sorted(options)} without data. Give options to "
                "`EvaluateMetric(module, ...)`, or pass `predictions` and `references`."
            )
        return super().compute()

    @override
    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return flatten(self.name, self._ask(predictions, references, {}))

    def _ask(self, predictions: Any, references: Any, options: dict[str, Any]) -> Any:
        inputs = {"predictions": _plain(predictions), "references": _plain(references)}
        if self._parts == [self.module]:
            first, _, has_references = _inputs(self.module)
            inputs[first] = inputs.pop("predictions")
            if not has_references:
                del inputs["references"]
        # Not in cache files, for which all processes of a machine would compete.
        with setting(self._parts, "keep_in_memory", True):
            result = self.module.compute(**inputs, **{**self._options, **options})
        if result is None:
            raise DataError(f"The metric `{self.name}` returned nothing.")
        return result


def _inputs(module: Any) -> tuple[str, Any, bool]:
    """Return the name and form of the input for predictions, and whether there are references."""
    features = module.features[0] if isinstance(module.features, list) else module.features
    first = next((name for name in features if name != "references"), "predictions")
    return first, features.get(first), "references" in features


def _uses(module: Any) -> Uses:
    _, form, _ = _inputs(module)
    while hasattr(form, "feature"):  # of a sequence
        form = form.feature
    return "values" if "float" in str(getattr(form, "dtype", "")) else "predictions"


def _plain(values: Any) -> Any:
    """Return what Arrow can read: arrays as NumPy arrays, of more dimensions as nested lists."""
    if isinstance(values, list):
        return [value.tolist() if is_array(value) else value for value in values]
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values
        return values.numpy() if values.ndim == 1 else values.tolist()
    return values.tolist() if is_array(values) and values.ndim > 1 else values


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
