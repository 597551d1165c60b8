"""Mean squared and mean absolute error."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.errors import ConfigError, DataError
from trainkit.metrics.local_metric import LocalMetric, Values
from trainkit.metrics.samples import real_columns
from trainkit.types import IGNORED

MultiOutput: TypeAlias = Literal["uniform_average", "raw_values"] | Sequence[float]


class MeanError(LocalMetric):
    """A mean error over samples, for one output or several, summed in float64.

    Args:
        multioutput: What becomes of several outputs. `"uniform_average"`: their mean.
            `"raw_values"`: one value for each. Numbers: their mean with these weights.

    Raises:
        ConfigError: `multioutput` is none of these.
    """

    uses = "values"
    higher_is_better = False
    _sums: tuple[Any, Any]  # errors of shape [outputs], weights; on the device of the data

    def __init__(self, *, multioutput: MultiOutput = "uniform_average", **options: Any) -> None:
        super().__init__(multioutput=multioutput, **options)
        is_known = multioutput in ("uniform_average", "raw_values")
        if isinstance(multioutput, str) and not is_known:
            raise ConfigError(
                f'`multioutput` of `{self.name}` must be "uniform_average", "raw_values" or a list '
                f"of weights, but is {multioutput!r}."
            )
        self.multioutput = multioutput
        self.keys = None if multioutput == "raw_values" else (self.name,)

    @override
    def _add(self, predictions: Any, references: Any, weights: Tensor | None) -> None:
        predicted = real_columns(self.name, "predictions", predictions)
        expected = real_columns(self.name, "references", references).to(predicted.device)
        sums, total = self._sums
        known = sums if self._samples else predicted
        if not predicted.shape[-1] == expected.shape[-1] == known.shape[-1]:
            raise DataError(
                f"The metric `{self.name}` got {predicted.shape[-1]} outputs per sample in "
                f"`predictions` and {expected.shape[-1]} in `references`, but needs as many in "
                "both, and the same in every batch."
            )
        is_whole = not torch.as_tensor(references).is_floating_point()
        if is_whole and expected.shape[-1] > 1 and bool((expected == IGNORED).any()):
            raise DataError(
                f"The metric `{self.name}` found {IGNORED} in `references` of whole numbers, which "
                "is what rows of different width are filled up with. Return rows of one width, or "
                "floats if it is a value."
            )
        errors = self._errors(predicted - expected)
        if weights is None:
            total = total + len(errors)
        else:
            weights = weights.to(errors.device)
            errors, total = errors * weights[:, None], total + weights.sum()
        errors = errors.sum(dim=0)
        self._sums = sums.to(errors.device) + errors if self._samples else errors, total

    @override
    def _values(self) -> Values:
        sums, total = self._sums
        total = float(total)
        errors = [self._final(error / total if total else math.nan) for error in sums.tolist()]
        if self.multioutput == "raw_values":
            return {self.name: errors}
        weights = [1.0] * len(errors)
        if not isinstance(self.multioutput, str):
            weights = [float(weight) for weight in self.multioutput]
        if len(weights) != len(errors) or math.fsum(weights) == 0:
            raise DataError(
                f"`multioutput` of `{self.name}` is {weights}, but must have one weight for each "
                f"of the {len(errors)} outputs, and a sum other than 0."
            )
        weighted = math.fsum(e * w for e, w in zip(errors, weights, strict=True))
        return {self.name: weighted / math.fsum(weights)}

    @abstractmethod
    def _errors(self, differences: Tensor) -> Tensor:
        """Return the error of each sample and output."""

    def _final(self, error: float) -> float:
        """Return what to report for the mean error of an output."""
        return error


class MSE(MeanError):
    """The mean of the squared differences. See `MeanError`.

    Args:
        squared: False: the square root of that mean, for each output.
        multioutput: See `MeanError`.
    """

    name = "mse"

    @checked
    def __init__(
        self, *, squared: bool = True, multioutput: MultiOutput = "uniform_average"
    ) -> None:
        super().__init__(squared=squared, multioutput=multioutput)
        self.squared = squared

    @override
    def _errors(self, differences: Tensor) -> Tensor:
        return differences.square()

    @override
    def _final(self, error: float) -> float:
        return error if self.squared else math.sqrt(error)


class MAE(MeanError):
    """The mean of the absolute differences. See `MeanError`."""

    name = "mae"

    def __init__(self, *, multioutput: MultiOutput = "uniform_average") -> None:
        super().__init__(multioutput=multioutput)

    @override
    def _errors(self, differences: Tensor) -> Tensor:
        return differences.abs()
