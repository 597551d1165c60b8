"""Tests of the asynchronous vote."""

import pytest
import torch

from tests.helpers.ranks import run_ranks
from trainkit.distributed import AsyncFlags, Processes
from trainkit.errors import DistributedError


def _vote(rank: int) -> list[tuple[int, ...]]:
    processes = Processes.start()
    vote = AsyncFlags(processes, size=2)
    answers = [vote.drain(), vote.exchange((0, 0))]
    answers.append(vote.exchange((int(rank == 1), 0)))
    assert processes.all_gather_bytes(bytes([rank]))[1] == b"\1"  # another collective in between
    answers.append(vote.exchange((0, 7 - rank)))
    answers += [vote.drain(), vote.drain()]
    return answers


@pytest.mark.parametrize("size", [2, 3])
def test_all_processes_read_the_vote_of_any_one_call_later(size: int) -> None:
    expected = [(0, 0), (0, 0), (0, 0), (1, 0), (0, 7), (0, 0)]
    assert run_ranks(size, _vote) == [expected] * size


def _ride(rank: int, dtype: torch.dtype) -> list[tuple[int, ...]]:
    processes = Processes.start()
    vote = AsyncFlags(processes, size=2)
    vote.rides = True
    answers = []
    for flags in ((0, 0), (rank, 64 - rank), (0, 31)):
        answers.append(vote.exchange(flags))
        gradients = torch.full((5,), float("nan") if rank == 0 else 1.0, dtype=dtype)
        joined = vote.board(gradients)
        assert joined[:5].equal(gradients) or rank == 0
        processes.all_reduce(joined).div_(processes.size)
        assert vote.board(gradients) is gradients  # what has boarded once is on its way
    answers.append(vote.exchange((5 * rank, 0)))
    answers.append(vote.drain())  # nothing was summed meanwhile: it goes on its own
    return answers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_flags_travel_with_what_is_averaged_anyway(dtype: torch.dtype) -> None:
    expected = [(0, 0), (0, 0), (2, 64), (0, 31), (10, 0)]
    assert run_ranks(3, _ride, dtype) == [expected] * 3


def test_on_one_process_the_flags_come_back_at_once() -> None:
    vote = AsyncFlags(Processes.start(), size=2)
    assert vote.exchange((1, 0)) == (1, 0)
    assert vote.drain() == (0, 0)


def test_another_number_of_flags_is_an_error() -> None:
    with pytest.raises(DistributedError, match="2 flags, but got 3"):
        AsyncFlags(Processes.start(), size=2).exchange((1, 0, 0))
