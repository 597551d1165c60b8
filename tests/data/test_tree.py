"""Walks through the containers of a batch."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

import pytest
import torch

from trainkit.containers.tree import class_named, copy_containers, count_samples, map_leaves
from trainkit.errors import DataError

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Item:
    x: Any
    y: Any


class Encoding(UserDict[str, Any]):
    """Such as tokenizers return."""

    def to(self, device: Any) -> "Encoding":
        raise AssertionError("Its items are moved one by one.")


class Graph:
    """Moves itself."""

    def to(self, device: Any) -> "Graph":
        return self


def test_a_class_is_found_that_another_version_keeps_in_a_private_module() -> None:
    assert class_named("pathlib._local:PurePosixPath") is PurePosixPath  # Python 3.13
    assert class_named("pathlib._local:Nothing") is None
    assert class_named("nowhere._local:Nothing") is None


def test_containers_keep_their_types_and_leaves_change() -> None:
    tree = {
        "list": [1, (2, 3)],
        "pair": Pair(4, {"x": 5}),
        "item": Item(6, [7]),
        "ordered": OrderedDict(a=8),
        "encoding": Encoding(ids=9),
        "proxy": MappingProxyType({"b": 10}),
    }
    found = map_leaves(tree, lambda leaf: leaf * 10)
    assert found == {
        "list": [10, (20, 30)],
        "pair": Pair(40, {"x": 50}),
        "item": Item(60, [70]),
        "ordered": OrderedDict(a=80),
        "encoding": Encoding(ids=90),
        "proxy": MappingProxyType({"b": 100}),
    }
    assert [type(part) for part in found.values()] == [type(part) for part in tree.values()]
    assert tree["item"] == Item(6, [7])


def test_a_copy_shares_tensors_and_objects_only() -> None:
    rows, graph = torch.arange(3), Graph()
    tree = {"x": [rows], "graph": graph}
    copied = copy_containers(tree)
    copied["x"].append(1)
    assert tree["x"] == [rows]
    assert copied["x"][0] is rows
    assert copied["graph"] is graph


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.tensor(1.0), torch.zeros(4)], 4),
        ({"text": ["a", "b"], "x": torch.zeros(5)}, 5),
        ({"text": ["a", "b"]}, 2),
        ([["a", "b", "c"], [1, 2, 3]], 3),
        (["a", "b", "c", "d"], 4),
        (Item(None, Encoding(ids=torch.zeros(6, 1))), 6),
        ([], 0),
    ],
)
def test_samples_are_counted_by_the_first_tensor_or_list(batch: Any, count: int) -> None:
    assert count_samples(batch) == count


def test_a_batch_without_tensor_or_list_has_no_count() -> None:
    with pytest.raises(DataError, match="of type `tuple` is not known"):
        count_samples((1.0, 2.0))
