"""The share of samples whose class is predicted right."""

import math
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.errors import ConfigError
from trainkit.metrics.local_metric import LocalMetric, Values
from trainkit.metrics.samples import class_labels, label_marks
from trainkit.types import IGNORED


class Accuracy(LocalMetric):
    """The share of samples whose predicted class is the true one, in [0, 1].

    Samples whose true class is -100 are left out, as losses of torch leave them out.

    Args:
        normalize: False: their number (or the sum of their weights) and not their share.
        multilabel: Where a sample has any of several labels, 0 or 1 (or -100 where it is not known)
            of shape [samples, labels]. "all": a sample is right where all its labels are, as for
            sklearn. "each": each label of each sample counts by itself.
    """

    name = "accuracy"
    keys = ("accuracy",)
    higher_is_better = True
    evaluate_dtype = "int64"
    _sums: tuple[Any, Any]  # what is right, what there is; stays on the device of the data

    @checked
    def __init__(
        self, *, normalize: bool = True, multilabel: Literal["all", "each"] | None = None
    ) -> None:
        super().__init__(normalize=normalize, multilabel=multilabel)
        if multilabel not in ("all", "each", None):
            raise ConfigError(
                f'`multilabel` must be "all" (a sample is right where all its labels are), "each" '
                f"(each label counts) or None, but is {multilabel!r}."
            )
        self.normalize = normalize
        self.multilabel = multilabel

    @override
    def _add(self, predictions: Any, references: Any, weights: Tensor | None) -> None:
        read = class_labels if self.multilabel is None else label_marks
        predicted = read(self.name, "predictions", predictions)
        expected = read(self.name, "references", references).to(predicted.device)
        right, total = self._sums
        counts = expected != IGNORED
        is_right = (predicted == expected) & counts
        if self.multilabel == "all":
            is_right, counts = (is_right | ~counts).all(1), counts.any(1)
            is_right = is_right & counts
        elif self.multilabel == "each" and weights is not None:
            weights = weights[:, None].expand(expected.shape)
        if weights is None:
            self._sums = right + is_right.sum(), total + counts.sum()
        else:
            weights = weights.to(predicted.device)
            self._sums = right + weights[is_right].sum(), total + weights[counts].sum()

    @override
    def _values(self) -> Values:
        right, total = (float(value) for value in self._sums)
        if not self.normalize:
            return {"accuracy": right}
        return {"accuracy": right / total if total else math.nan}
