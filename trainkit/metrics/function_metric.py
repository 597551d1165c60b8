"""Any function of predictions and references as a metric."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import override

from trainkit.config import checked
from trainkit.errors import ConfigError
from trainkit.metrics.collecting import CollectingMetric
from trainkit.metrics.figures import flatten

__all__ = ["FunctionMetric"]


class FunctionMetric(CollectingMetric):
    """Calls `function(predictions, references)` once, with all samples.

    Args:
        function: Returns a number, or a mapping of names to numbers. Gets CPU tensors where the
            evaluation step returned tensors.
        name: Key of the figure where `function` returns a single number; the function's own name
            where not given.
        higher_is_better: Whether the higher figure is the better one, for all figures; None: no
            value of them counts as the best.

    Raises:
        ConfigError: `function` cannot be called with predictions and references in this order.
    """

    @checked
    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        *,
        name: str | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        super().__init__(_function_name(function) if name is None else name)
        _check_parameters(self.name, function)
        if higher_is_better is not None and not isinstance(higher_is_better, bool):
            raise ConfigError(
                f"`higher_is_better` of `{self.name}` must be True, False or None, but is "
                f"{higher_is_better!r}."
            )
        self._function = function
        self.higher_is_better = higher_is_better

    @override
    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return flatten(self.name, self._function(predictions, references))


def _function_name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    name: str = getattr(function, "__name__", type(function).__name__)
    return name.strip("<>")  # a lambda is called `<lambda>`


def _check_parameters(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some functions written in C do not tell
    try:
        bound = signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"The metric function `{name}` takes {signature}, but is called as "
            f"`{name}(predictions, references)`. Give it these two parameters."
        ) from error
    if next(iter(bound.arguments)) == "y_true":
        # Precision would silently become recall, and recall precision.
        raise ConfigError(
            f"The metric function `{name}` takes the true values first, but is called as "
            f"`{name}(predictions, references)`. Swap them: "
            f"`lambda predictions, references: {name}(references, predictions)`."
        )
