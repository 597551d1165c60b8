"""Tests of the asynchronous vote."""

import pytest

from tests.helpers.ranks import run_ranks
from trainkit.distributed import Processes, Vote
from trainkit.errors import DistributedError


def _vote(rank: int) -> list[tuple[int, ...]]:
    processes = Processes.start()
    vote = Vote(processes, size=2)
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


def test_on_one_process_the_flags_come_back_at_once() -> None:
    vote = Vote(Processes.start(), size=2)
    assert vote.exchange((1, 0)) == (1, 0)
    assert vote.drain() == (0, 0)


def test_another_number_of_flags_is_an_error() -> None:
    with pytest.raises(DistributedError, match="2 flags, but got 3"):
        Vote(Processes.start(), size=2).exchange((1, 0, 0))
