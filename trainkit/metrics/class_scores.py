"""Precision, recall and F1: scores from the counts of each class."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.errors import ConfigError, DataError
from trainkit.metrics.local_metric import LocalMetric, Values
from trainkit.metrics.samples import class_labels, label_marks
from trainkit.types import IGNORED

Average: TypeAlias = Literal["binary", "macro", "micro", "weighted"] | None
Counts: TypeAlias = Sequence[float]
"""Of one class, or of several together: samples that are predicted right, predicted, true."""

SHOWN_LABELS = 10

_AVERAGES = ("binary", "macro", "micro", "weighted", None)


class ClassScore(LocalMetric):
    """A score of each class, and its average, from exact counts.

    Samples whose true class is -100 are left out, as losses of torch leave them out.

    Args:
        average: `"binary"`: the score of the class `pos_label` of at most two. `"micro"`: the
            score of the counts over all classes. `"macro"`: the mean of the classes' scores.
            `"weighted"`: the same, weighted by how often each class is true. None: one value
            for each class.
        labels: The classes to look at, in this order; all classes that were seen, in ascending
            order, where not given. Not for `"binary"`.
        pos_label: The class that `"binary"` looks at.
        zero_division: The score of a class where the score would divide by zero: 0, 1, or NaN
            (left out of averages). `"warn"`: 0, and a warning.
        multilabel: A sample has any of several labels: predictions and references are 0 or 1 (or
            -100 where it is not known) of shape [samples, labels], and each label counts like a
            class, by its column. With any `average` but `"binary"`.

    Raises:
        ConfigError: An option is unknown, or has no effect together with the others.
    """

    higher_is_better = True
    evaluate_dtype = "int64"
    _asks: ClassVar[str]  # what a class must have for the score to be defined
    _sums: dict[int, list[float]]  # counts by class: whole numbers unless weighted

    @checked
    def __init__(
        self,
        *,
        average: Average = "binary",
        labels: Sequence[int] | None = None,
        pos_label: int = 1,
        zero_division: float | Literal["warn"] = "warn",
        multilabel: bool = False,
    ) -> None:
        super().__init__(
            average=average,
            labels=labels,
            pos_label=pos_label,
            zero_division=zero_division,
            multilabel=multilabel,
        )
        self.multilabel = multilabel
        self.average = average
        self.labels = None if labels is None else [int(label) for label in labels]
        self.pos_label = pos_label
        self.zero_division = zero_division
        _check_options(self)
        if average is not None:
            self.keys = (self.name,)
        elif labels is not None:
            self.keys = tuple(f"{self.name}/{label}" for label in self.labels or ())

    @override
    def _zero(self) -> dict[int, list[float]]:
        return {}

    @override
    def _add(self, predictions: Any, references: Any, weights: Tensor | None) -> None:
        if self.multilabel:
            self._add_labels(predictions, references, weights)
            return
        predicted = class_labels(self.name, "predictions", predictions).cpu()
        expected = class_labels(self.name, "references", references).cpu()
        counted = expected != IGNORED
        predicted, expected = predicted[counted], expected[counted]
        weights = None if weights is None else weights.cpu()[counted]
        if (predicted == IGNORED).any():
            raise DataError(
                f"The metric `{self.name}` found {IGNORED} in `predictions` of samples that have a "
                "class. Predict one of the classes for each."
            )
        classes, indices = torch.unique(torch.cat([predicted, expected]), return_inverse=True)
        predicted, expected = indices[: len(predicted)], indices[len(predicted) :]
        is_right = predicted == expected

        def count(of: Tensor, weights: Tensor | None) -> Tensor:
            return torch.bincount(of, weights, minlength=len(classes))

        right = count(expected[is_right], None if weights is None else weights[is_right])
        counts = torch.stack([right, count(predicted, weights), count(expected, weights)], dim=1)
        self._count(classes.tolist(), counts)

    def _add_labels(self, predictions: Any, references: Any, weights: Tensor | None) -> None:
        """Add samples with any of several labels."""
        predicted = label_marks(self.name, "predictions", predictions).cpu()
        expected = label_marks(self.name, "references", references).cpu()
        if predicted.shape != expected.shape or (predicted == IGNORED).any():
            raise DataError(
                f"The metric `{self.name}` got predictions of shape {list(predicted.shape)} and "
                f"references of shape {list(expected.shape)}, or {IGNORED} among the predictions. "
                "Predict 0 or 1 for each label."
            )
        counted = expected != IGNORED
        marks = (predicted * expected, predicted, expected)
        rows = torch.stack([torch.where(counted, each, 0) for each in marks], dim=2)
        if weights is not None:
            rows = rows * weights.cpu()[:, None, None]
        self._count(range(rows.shape[1]), rows.sum(0))

    def _count(self, labels: Sequence[int], counts: Tensor) -> None:
        for label, new in zip(labels, counts.tolist(), strict=True):
            old = self._sums.get(label, (0, 0, 0))
            self._sums[label] = [a + b for a, b in zip(old, new, strict=True)]

    @override
    def _values(self) -> Values:
        if not self._sums:
            return {}  # no sample has a class
        counts: list[Counts] = [self._sums.get(label, (0, 0, 0)) for label in self._scored()]
        if self.average == "micro":
            counts = [[sum(column) for column in zip(*counts, strict=True)]]
        scores = [self._score(entry) for entry in counts]
        if self.average is not None:
            weights = [entry[2] if self.average == "weighted" else 1 for entry in counts]
            return {self.name: _mean(scores, weights)}
        return {self.name: scores if len(scores) > 1 else scores[0]}

    @override
    def _flat(self, values: Values) -> dict[str, float]:
        if self.average is not None or not values:
            return super()._flat(values)
        scores = values[self.name]
        scores = scores if isinstance(scores, list) else [scores]
        # Named by class and not by place: a class that never comes up would shift the others.
        pairs = zip(self._scored(), scores, strict=True)
        return {f"{self.name}/{label}": score for label, score in pairs}

    def _scored(self) -> Sequence[int]:
        """Return the classes to score, in order."""
        if self.average != "binary":
            return sorted(self._sums) if self.labels is None else self.labels
        seen = sorted(self._sums)
        if len(seen) > 2:
            more = f" and {len(seen) - SHOWN_LABELS} more" if len(seen) > SHOWN_LABELS else ""
            raise DataError(
                f'The metric `{self.name}` with `average="binary"` needs two classes, but saw '
                f"{seen[:SHOWN_LABELS]}{more}. Average over classes: "
                f'`metrics.load("{self.name}", average="macro")`, or "micro", or "weighted"; with '
                "None each class has its value."
            )
        if len(seen) == 2 and self.pos_label not in seen:
            raise DataError(
                f'The metric `{self.name}` with `average="binary"` looks at the class '
                f"{self.pos_label}, but saw only {seen}. Name one of these: "
                f'`metrics.load("{self.name}", pos_label={seen[-1]})`.'
            )
        return [self.pos_label]

    def _score(self, counts: Counts) -> float:
        numerator, denominator = self._ratio(*counts)
        if denominator != 0:
            return numerator / denominator
        if self.zero_division != "warn":
            return float(self.zero_division)
        warnings.warn(
            f"`{self.name}` is set to 0 where no sample is {self._asks}. Set `zero_division` to "
            "say what it should be.",
            stacklevel=2,
        )
        return 0.0

    @abstractmethod
    def _ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:
        """Return numerator and denominator of the score."""


class Precision(ClassScore):
    """The share of what is predicted to be of a class that is of it. See `ClassScore`."""

    name = "precision"
    _asks = "predicted to be of the class"

    @override
    def _ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:
        return right, predicted


class Recall(ClassScore):
    """The share of what is of a class that is predicted to be of it. See `ClassScore`."""

    name = "recall"
    _asks = "of the class"

    @override
    def _ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:
        return right, true


class F1(ClassScore):
    """The harmonic mean of precision and recall. See `ClassScore`."""

    name = "f1"
    _asks = "of the class, and none is predicted to be"

    @override
    def _ratio(self, right: float, predicted: float, true: float) -> tuple[float, float]:
        return 2 * right, predicted + true


def _mean(scores: list[float], weights: Sequence[float]) -> float:
    """Return the weighted mean without NaN; the plain mean where all weights are 0."""
    pairs = [(s, w) for s, w in zip(scores, weights, strict=True) if not math.isnan(s)]
    if not pairs:
        return math.nan
    total = math.fsum(weight for _, weight in pairs)
    if total == 0:
        return math.fsum(score for score, _ in pairs) / len(pairs)
    return math.fsum(score * weight for score, weight in pairs) / total


def _check_options(metric: ClassScore) -> None:
    name, average, labels = metric.name, metric.average, metric.labels
    if average not in _AVERAGES:
        raise ConfigError(
            f"`average` of `{name}` must be one of {list(_AVERAGES)}, but is {average!r}."
        )
    if average == "binary" and metric.multilabel:
        raise ConfigError(
            f'`{name}` with `multilabel=True` needs an `average` over the labels: "macro", "micro" '
            'or "weighted"; with None each label has its value.'
        )
    if average == "binary" and labels is not None:
        raise ConfigError(
            f'`labels` of `{name}` is {labels}, but `average="binary"` looks at `pos_label` only. '
            'Choose another `average`, such as "macro", or leave `labels` out.'
        )
    if average != "binary" and metric.pos_label != 1:
        raise ConfigError(
            f'`pos_label` of `{name}` is {metric.pos_label}, but only `average="binary"` looks at '
            f"it. Use `labels=[{metric.pos_label}]` to score a single class."
        )
    if labels is not None and (not labels or len(set(labels)) != len(labels)):
        raise ConfigError(
            f"`labels` of `{name}` must name at least one class, each once, but is {labels}."
        )
    zero = metric.zero_division
    is_nan = zero != zero
    if not (is_nan or zero in (0, 1, "warn")):
        raise ConfigError(
            f'`zero_division` of `{name}` must be 0, 1, NaN or "warn", but is {zero!r}.'
        )
