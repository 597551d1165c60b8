"""Several batches travel as one where they are alike, and come apart as they were."""

from typing import Any

import numpy as np
import pytest
import torch

from trainkit.containers.sample_rows import cut, join, parse, split
from trainkit.containers.wire_format import decode, encode

SIZES = [3, 1, 0, 2]


def nodes(values: list[Any]) -> list[Any]:
    return [cut(parse(v, 3, "value", {}), size) for v, size in zip(values, SIZES, strict=True)]


def batch(number: int) -> dict[str, Any]:
    return {
        "predictions": torch.arange(3) + 10 * number,
        "inside": (torch.ones(3, 2) * number, None),
    }


def test_batches_of_tensors_come_apart_as_they_were() -> None:
    given = nodes([batch(number) for number in range(4)])
    joined = join(given)
    assert joined is not None
    found: list[Any] = [*split(decode(encode(joined)), SIZES)]
    for one, other in zip(found, given, strict=True):
        assert one.class_name == other.class_name
        assert one.keys == other.keys
        assert torch.equal(one.children[0].values, other.children[0].values)
        assert torch.equal(one.children[1].children[0].values, other.children[1].children[0].values)
        assert one.children[1].children[1] == other.children[1].children[1]


@pytest.mark.parametrize(
    "last",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, 2),
        np.zeros(3),
        ["a", "b", "c"],
        {"key": torch.zeros(3)},
    ],
)
def test_batches_that_differ_travel_one_by_one(last: Any) -> None:
    assert join(nodes([torch.zeros(3)] * 3 + [last])) is None
    assert join(nodes([{"key": torch.zeros(3)}] * 3 + [{"key": last}])) is None


def test_arrays_and_texts_travel_one_by_one() -> None:
    for value in (np.zeros(3), ["a", "b", "c"]):
        given = nodes([value] * 4)
        assert join(given) is None
        assert [type(decode(encode(node))) for node in given] == [type(n) for n in given]


def test_containers_with_other_keys_travel_one_by_one() -> None:
    other = {"another": torch.zeros(3)}
    assert join(nodes([{"key": torch.zeros(3)}] * 3 + [other])) is None
