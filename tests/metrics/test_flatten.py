"""Results of any shape become a flat table."""

from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch

from trainkit.errors import DataError
from trainkit.metrics.metric import flatten


@pytest.mark.parametrize(
    ("result", "figures"),
    [
        (0.5, {"m": 0.5}),
        (torch.tensor(0.5), {"m": 0.5}),
        (numpy.float32(0.5), {"m": 0.5}),
        (torch.tensor([1, 2]), {"m/0": 1.0, "m/1": 2.0}),
        ({"a": 1, "b": numpy.array([0.5, 1])}, {"a": 1.0, "b/0": 0.5, "b/1": 1.0}),
        ({"PER": {"f1": True, "n": numpy.int64(3)}}, {"PER/f1": 1.0, "PER/n": 3.0}),
        ({"counts": (1, [2, 3])}, {"counts/0": 1.0, "counts/1/0": 2.0, "counts/1/1": 3.0}),
        ({0: 0.25}, {"0": 0.25}),
        ({}, {}),
    ],
)
def test_results_are_flattened(result: Any, figures: dict[str, float]) -> None:
    flat = flatten("m", result)
    assert flat == figures
    assert all(type(value) is float for value in flat.values())


@pytest.mark.parametrize("value", ["0.5", None, 1j, Decimal(1)])
def test_what_is_no_number_is_named_with_its_type(value: Any) -> None:
    with pytest.raises(DataError, match=rf"`m` returned a {type(value).__name__} under `a/b`"):
        flatten("m", {"a": {"b": value}})


def test_two_figures_of_one_name_are_refused() -> None:
    with pytest.raises(DataError, match="two values named `a/b`"):
        flatten("m", {"a": {"b": 1.0}, "a/b": 2.0})
