"""Chunks of samples: how many there are, and what they are as numbers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.basics.device import wide_dtype
from trainkit.containers.tree import is_array
from trainkit.errors import DataError
from trainkit.types import IGNORED


def is_structure(values: Any) -> bool:
    """Whether `values` holds fields side by side, not samples: a mapping, a tuple of arrays."""
    if isinstance(values, tuple):
        return len(values) > 0 and all(is_array(value) for value in values)
    return isinstance(values, Mapping)


def count_samples(metric: str, argument: str, values: Any) -> int:
    """Return the number of samples in `values`."""
    if is_structure(values):
        fields = values.values() if isinstance(values, Mapping) else values
        counts = {count_samples(metric, argument, field) for field in fields}
        if len(counts) == 1:
            return counts.pop()
        raise DataError(
            f"The metric `{metric}` got `{argument}` whose fields have {sorted(counts)} samples, "
            "but needs one length for all. Return one entry per sample in each field."
        )
    is_scalar = is_array(values) and len(values.shape) == 0
    if is_scalar or isinstance(values, str) or not hasattr(values, "__len__"):
        raise DataError(
            f"The metric `{metric}` needs one entry per sample in `{argument}`, but got a single "
            f"{type(values).__name__}. Return a tensor or list with one entry per sample."
        )
    return len(values)


def matching_length(metric: str, predictions: Any, references: Any) -> int:
    """Return the number of samples in `predictions` and in `references`."""
    predicted = count_samples(metric, "predictions", predictions)
    expected = count_samples(metric, "references", references)
    if predicted != expected:
        raise DataError(
            f"The metric `{metric}` got {predicted} predictions and {expected} references, but "
            "needs as many of one as of the other. Check what the evaluation step returns."
        )
    return predicted


def class_labels(metric: str, argument: str, values: Any) -> Tensor:
    """Return `values` as whole numbers of shape `[samples]`, on the device where they are."""
    labels = _tensor(metric, argument, values)
    if labels.numel() != len(labels):
        raise DataError(
            f"The metric `{metric}` needs one class per sample in `{argument}`, but got the shape "
            f"{list(labels.shape)}. Where a sample has several labels, each 0 or 1, say so by "
            f"`metrics.load({metric!r}, multilabel=...)`, if it has that option; for segmentation "
            "and tokens pass a metric of torchmetrics or a function of your own; turn scores into "
            "classes, such as by `argmax(1)`."
        )
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise DataError(
            f"The metric `{metric}` needs class labels in `{argument}`, but got fractions. Turn "
            "scores into classes first, such as by a threshold."
        )
    return labels.reshape(-1).to(torch.int64)


def label_marks(metric: str, argument: str, values: Any) -> Tensor:
    """Return which labels samples have, as whole numbers of shape `[samples, labels]`."""
    marks = _tensor(metric, argument, values)
    if marks.ndim != 2 or not bool(((marks == 0) | (marks == 1) | (marks == IGNORED)).all()):
        raise DataError(
            f"The metric `{metric}` with `multilabel` needs 0 or 1 for each label of each sample "
            f"in `{argument}`, of shape [samples, labels], but got the shape {list(marks.shape)} "
            "or other values. Turn scores into 0 and 1, such as by `scores > 0`."
        )
    return marks.to(torch.int64)


def real_numbers(metric: str, argument: str, values: Any) -> Tensor:
    """Return `values` as float64 of shape `[samples]`."""
    numbers = real_columns(metric, argument, values)
    if numbers.shape[1] != 1:
        raise DataError(
            f"The metric `{metric}` needs one number per sample in `{argument}`, but got "
            f"{numbers.shape[1]} numbers for each."
        )
    return numbers[:, 0]


def real_columns(metric: str, argument: str, values: Any) -> Tensor:
    """Return `values` as float64 of shape `[samples, outputs]`."""
    numbers = _tensor(metric, argument, values)
    if numbers.ndim > 2:
        raise DataError(
            f"The metric `{metric}` needs `{argument}` of shape [samples] or [samples, outputs], "
            f"but got {list(numbers.shape)}. Flatten the outputs of each sample."
        )
    if wide_dtype(numbers.device.type) != torch.float64:
        numbers = numbers.cpu()
    return (numbers[:, None] if numbers.ndim == 1 else numbers).double()


def _tensor(metric: str, argument: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values).detach()
        if tensor.is_floating_point() and not is_array(values):
            # Python's floats have 64 bits, of which torch keeps 32 unless told.
            tensor = torch.as_tensor(values, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"The metric `{metric}` needs numbers in `{argument}`, but got a "
            f"{type(values).__name__} that torch cannot read ({error}). Encode the values as "
            "numbers of one shape."
        ) from error
    if tensor.is_complex():
        raise DataError(
            f"The metric `{metric}` needs real numbers in `{argument}`, but got {tensor.dtype}."
        )
    return tensor
