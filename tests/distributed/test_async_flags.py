"""Tests of flags that are exchanged while the training goes on."""

import pytest

from tests.helpers.ranks import run_ranks
from trainkit.distributed import AsyncFlags, Processes
from trainkit.errors import DistributedError


def _exchange(rank: int) -> list[tuple[int, ...]]:
    processes = Processes.start()
    flags = AsyncFlags(processes, size=2)
    answers = [flags.result()]
    for mine in ((0, 0), (int(rank == 1), 0), (0, 7 - rank)):
        flags.exchange(mine)
        gathered = processes.all_gather_bytes(bytes([rank]))  # another collective in between
        assert gathered[1] == b"\1"
        answers.append(flags.result())
    return [*answers, flags.result()]


@pytest.mark.parametrize("size", [2, 3])
def test_all_processes_read_the_largest_of_each_flag(size: int) -> None:
    expected = [(0, 0), (0, 0), (1, 0), (0, 7), (0, 0)]
    assert run_ranks(size, _exchange) == [expected] * size


def test_on_one_process_the_flags_come_back() -> None:
    flags = AsyncFlags(Processes.start(), size=2)
    flags.exchange((1, 0))
    assert flags.result() == (1, 0)
    assert flags.result() == (0, 0)


def test_another_number_of_flags_is_an_error() -> None:
    with pytest.raises(DistributedError, match="2 flags, but got 3"):
        AsyncFlags(Processes.start(), size=2).exchange((1, 0, 0))
