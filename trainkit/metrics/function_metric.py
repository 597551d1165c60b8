"""Any function of predictions and references as a metric."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.errors import ConfigError, DataError
from trainkit.metrics.collecting import CollectingMetric
from trainkit.metrics.metric import Uses, flatten

_USES = ("predictions", "scores", "probabilities")
_OF_PROBABILITIES = {"log_loss", "d2_log_loss_score"}  # whose parameter is `y_pred` in old releases
_OF_SCORES = {  # by name: what gives a number of classes too, but a wrong one
    *("roc_auc_score", "roc_curve", "average_precision_score", "precision_recall_curve"),
    *("det_curve", "brier_score_loss", "log_loss", "top_k_accuracy_score", "calibration_curve"),
    *("coverage_error", "label_ranking_average_precision_score", "label_ranking_loss"),
    *("auroc", "average_precision", "calibration_error", "topk"),
    *("sigmoid", "softmax", "log_softmax", "cross_entropy"),
}


class FunctionMetric(CollectingMetric):
    """Calls `function(predictions, references)` once, with all samples.

    Functions in the manner of sklearn are called as `function(y_true, ...)`.

    Args:
        function: Returns a number, or a mapping of names to numbers. Gets CPU tensors where the
            evaluation step returned tensors.
        uses: What it gets as predictions; see `Metric.uses`. None: predictions, or what the name
            of sklearn's second parameter says, such as `y_score`.
        name: Key of the value where `function` returns a single number; the function's own name
            where not given.
        higher_is_better: Whether the higher value is the better one, for all values; None: no
            value of them counts as the best.

    Raises:
        ConfigError: `function` cannot be called with predictions and references, or calls
            something that wants scores although nothing says that it gets them.
    """

    @checked
    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        *,
        uses: Uses | None = None,
        name: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        super().__init__(_function_name(function) if name is None else name)
        second = _check_parameters(self.name, function)
        self._is_like_sklearn = second is not None
        self.uses = _uses(self.name, function, second) if uses is None else uses
        if self.uses not in _USES:
            raise ConfigError(f"`uses` of `{self.name}` must be one of {_USES}, but is {uses!r}.")
        if higher_is_better is not None and not isinstance(higher_is_better, bool):
            raise ConfigError(
                f"`higher_is_better` of `{self.name}` must be True, False or None, but is "
                f"{higher_is_better!r}."
            )
        self.function = function
        self.higher_is_better = higher_is_better

    @override
    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if not self._is_like_sklearn:
            return flatten(self.name, self.function(predictions, references))
        if getattr(predictions, "dtype", None) is torch.bfloat16:
            predictions = predictions.float()  # NumPy has no such numbers
        name, columns = _function_name(self.function), getattr(predictions, "shape", ())[1:]
        is_for_one = self.uses == "scores" and name in _OF_SCORES and columns == (2,)
        if is_for_one and getattr(references, "ndim", 0) == 1:
            raise DataError(
                f"`{name}` takes one score a sample of two classes, but got two. Of class 1: "
                f'`FunctionMetric(lambda p, r: {name}(r, p[:, 1]), uses="probabilities")`. Where a '
                "sample may have both labels, give `references` a column for each."
            )
        return flatten(self.name, self.function(references, predictions))


def scores(
    function: Callable[[Any, Any], Any],
    *,
    name: str | None = None,
    higher_is_better: bool | None = None,
) -> FunctionMetric:
    """Return a `FunctionMetric` that gets what the model returns, such as logits, not classes."""
    return FunctionMetric(function, uses="scores", name=name, higher_is_better=higher_is_better)


def _function_name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return name.strip("<>")  # a lambda is called `<lambda>`


def _check_parameters(name: str, function: Callable[..., Any]) -> str | None:
    """Return the parameter for predictions of a function that takes `y_true` first, else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # some functions written in C do not tell
    try:
        bound = signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"The metric function `{name}` takes {signature}, but is called as "
            f"`{name}(predictions, references)`. Give it these two parameters."
        ) from error
    first, second = [*bound.arguments, ""][:2]
    return second if first == "y_true" else None


def _uses(name: str, function: Any, second: str | None) -> Uses:
    """Return what a function gets, by its parameters, as sklearn names them."""
    if second is not None:
        several = isinstance(function, partial) and function.keywords.get("multi_class", "raise")
        if second in ("y_prob", "y_proba") or name in _OF_PROBABILITIES:
            return "probabilities"
        if several in ("ovr", "ovo"):  # scores that do not sum to 1 are refused
            return "probabilities"
        return "predictions" if second == "y_pred" else "scores"
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    called = [] if code is None else sorted({*code.co_names} & _OF_SCORES)
    if called:
        raise ConfigError(
            f"The metric function `{name}` calls `{called[0]}`, which wants scores, but functions "
            f"get classes. Write `metrics.scores({name})` for what the model returns, "
            f'`FunctionMetric({name}, uses="probabilities")`, or `uses="predictions"` if it is to '
            "get classes; functions of sklearn can be passed as they are."
        )
    return "predictions"
