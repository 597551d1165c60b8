"""One table of what differs from Accelerate: the page is written from it, tests show each row."""

import ast
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from tests.accelerator import test_against_accelerate
from tests.accelerator.toys import numbers, prepared
from tests.helpers.ranks import run_ranks
from trainkit import Accelerator

ROOT = Path(__file__).resolve().parents[2]
PAGE = runpy.run_path(str(ROOT / "docs" / "differences.py"))
DIFFERENCES = PAGE["differences"]()
OF_BEHAVIOURS = [name for name, *_ in test_against_accelerate.DIFFERENCES]


@cache
def _tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / f"{file}.py").read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_is_written_from_the_table() -> None:
    assert PAGE["PAGE"].read_text("utf-8") == PAGE["written"](), (
        "The table has changed: run `python docs/differences.py`."
    )


def test_each_difference_is_shown_by_a_test() -> None:
    for row in DIFFERENCES:
        assert row.keys() <= {"id", "where", "theirs", "ours", "write", "shown"}, row["id"]
        assert ("theirs" in row) == (row["where"] == "bugs"), row["id"]
        assert row["shown"], row["id"]
        for place in row["shown"]:
            file, _, test = place.partition("::")
            known = _tests(file) if test else OF_BEHAVIOURS
            assert any(name == test if test else name.startswith(place) for name in known), place
    ids = [row["id"] for row in DIFFERENCES]
    assert len(set(ids)) == len(ids)


def test_each_difference_that_a_comparison_finds_is_on_the_page() -> None:
    shown = tuple(place for row in DIFFERENCES for place in row["shown"] if "::" not in place)
    assert not [name for name in OF_BEHAVIOURS if not name.startswith(shown)]


def test_a_sampler_is_ahead_of_the_batches() -> None:
    taken: list[int] = []

    class Noting(SequentialSampler):
        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                taken.append(index)
                yield index

    data = numbers(6)
    loader = Accelerator(cpu=True).prepare(DataLoader(data, 2, sampler=Noting(data)))
    next(iter(loader))
    assert taken == [0, 1, 2, 3, 4, 5]


def _epochs_told(rank: int) -> list[int]:
    told: list[int] = []

    class Own:
        batch_size, drop_last = 2, False
        set_epoch = told.append

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3], [4, 5], [6, 7]])

        def __len__(self) -> int:
            return 4

    loader = Accelerator(cpu=True).prepare(DataLoader(numbers(8), batch_sampler=Own()))
    list(loader)
    list(loader)
    return told


def test_a_batch_sampler_is_told_the_epoch_on_several_processes() -> None:
    assert run_ranks(2, _epochs_told) == [[0, 1], [0, 1]]


def test_states_hold_no_pickle(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, *_ = prepared(accelerator)
    saved = model[0].weight.clone()
    with pytest.warns(UserWarning, match="writes safetensors all the same"):
        accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert not [*tmp_path.rglob("*.bin"), *tmp_path.rglob("*.pt")]
    torch.nn.init.ones_(model[0].weight)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model[0].weight, saved)


def test_a_state_in_the_same_folder_replaces_the_earlier_one(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, *_ = prepared(accelerator)
    accelerator.save_state(tmp_path / "state")
    torch.nn.init.ones_(model[0].weight)
    accelerator.save_state(tmp_path / "state")
    torch.nn.init.zeros_(model[0].weight)
    accelerator.load_state(tmp_path / "state")
    assert model[0].weight.eq(1).all()
