"""Tests of the helper that runs ranks."""

import os
import time
from typing import Any

import pytest
import torch

from tests.helpers.ranks import RanksError, run_ranks


def _environment(rank: int, add: int = 0) -> tuple[Any, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return (rank + add, torch.full((2,), rank), *(os.environ[name] for name in names))


def _fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unwell")


def _die_on_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)


def _sleep_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def test_results_come_in_rank_order_with_the_environment_of_torchrun() -> None:
    results = run_ranks(2, _environment, add=10)
    assert [result[0] for result in results] == [10, 11]
    assert torch.equal(results[1][1], torch.tensor([1, 1]))
    assert results[1][2:] == ("1", "1", "2", "2")


def test_one_rank_runs_in_a_child_too() -> None:
    assert run_ranks(1, lambda rank: os.getpid())[0] != os.getpid()


def test_an_error_on_one_rank_comes_with_its_traceback() -> None:
    with pytest.raises(RanksError, match=r"rank 1 of 2: raised(.|\n)*rank one is unwell") as caught:
        run_ranks(2, _fail_on_one)
    assert list(caught.value.failures) == [1]


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RanksError, match="rank 1 of 2: died without a word, exit code 7"):
        run_ranks(2, _die_on_one)


def test_a_rank_that_hangs_is_killed_and_shows_where_it_was() -> None:
    start = time.monotonic()
    with pytest.raises(RanksError, match=r"rank 1 of 2: still running(.|\n)*_sleep_on_one"):
        run_ranks(2, _sleep_on_one, timeout=1)
    assert time.monotonic() - start < 300
