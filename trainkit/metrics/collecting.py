"""Metrics that look at the whole evaluation at once."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.containers.tree import is_array
from trainkit.errors import DataError
from trainkit.metrics.metric import Metric
from trainkit.metrics.samples import is_structure, matching_length


class CollectingMetric(Metric):
    """Keeps every chunk in host memory and computes from all of them together.

    Tensors and arrays are joined along the samples; where their other dimensions differ, they
    become a list with one entry per sample. Mappings and tuples of arrays are joined field by
    field, anything else becomes one list.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    @override
    def reset(self) -> None:
        self._predictions: list[Any] = []
        self._references: list[Any] = []

    @override
    def update(self, predictions: Any, references: Any) -> None:
        if matching_length(self.name, predictions, references) > 0:
            self._predictions.append(_kept(predictions))
            self._references.append(_kept(references))

    @override
    def compute(self) -> dict[str, float]:
        if not self._predictions:
            return {}
        predictions = _join(self.name, "predictions", self._predictions)
        return self._compute(predictions, _join(self.name, "references", self._references))

    @abstractmethod
    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return the values over all samples; there is at least one."""


def _kept(values: Any) -> Any:
    """Return `values` without graph, in host memory, safe from changes to its containers."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, Mapping):
        return {key: _kept(value) for key, value in values.items()}
    if is_structure(values):
        return tuple(_kept(value) for value in values)
    if is_array(values):
        return values
    return [value.detach().cpu() if isinstance(value, Tensor) else value for value in values]


def _join(metric: str, argument: str, chunks: list[Any]) -> Any:
    first = chunks[0]
    forms = list(dict.fromkeys(map(_form, chunks)))
    if len(forms) > 1:
        raise DataError(
            f"The metric `{metric}` got `{argument}` of different forms: {forms[0]}, and later "
            f"{forms[1]}. Return the same form from every evaluation step."
        )
    if isinstance(first, dict):
        return {key: _join(metric, argument, [chunk[key] for chunk in chunks]) for key in first}
    if is_structure(first):
        fields = zip(*chunks, strict=True)
        return tuple(_join(metric, argument, list(field)) for field in fields)
    if is_array(first) and all(chunk.shape[1:] == first.shape[1:] for chunk in chunks):
        return _concatenated(chunks)
    return [entry for chunk in chunks for entry in chunk]


def _form(chunk: Any) -> str:
    """Return what chunks must have in common to be joined, in words."""
    if isinstance(chunk, dict):
        return f"a mapping of {sorted(map(str, chunk))}"
    if is_structure(chunk):
        return f"a tuple of {len(chunk)}"
    return type(chunk).__name__


def _concatenated(chunks: list[Any]) -> Any:
    if len(chunks) == 1:
        return chunks[0]
    if isinstance(chunks[0], Tensor):
        return torch.cat(chunks)
    import numpy

    return numpy.concatenate(chunks)
