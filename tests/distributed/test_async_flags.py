"""Tests of flags that are exchanged while the training goes on."""

from collections.abc import Sequence

import pytest
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from trainkit.distributed import AsyncFlags, Processes
from trainkit.errors import DistributedError
from trainkit.training.run_parts import Requests


def _exchange(rank: int) -> list[tuple[int, ...] | None]:
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
    expected = [None, (0, 0), (1, 0), (0, 7), None]
    assert run_ranks(size, _exchange) == [expected] * size


def test_on_one_process_the_flags_come_back() -> None:
    flags = AsyncFlags(Processes.start(), size=2)
    flags.exchange((1, 0))
    assert flags.result() == (1, 0)
    assert flags.result() is None


def _rhythm(rank: int) -> list[list[int]]:
    """Return, for windows of other lengths, the windows after which flags were exchanged."""
    processes = Processes.start()
    exchanged = []
    for seconds in ((0.001, 0.002), (0.02, 0.05), (0.25, 0.1), (3.0, 0.0)):
        now = 0.0
        flags = AsyncFlags(processes, size=1, clock=lambda: now)  # noqa: B023
        windows = []
        for window in range(1, 41):
            now += seconds[rank]
            flags.result()
            if flags.count_window():
                flags.exchange([0])
                windows.append(window)
        exchanged.append(windows)
    return exchanged


@pytest.mark.e2e
def test_the_slowest_process_says_when_the_next_exchange_comes() -> None:
    expected = [[1, 33], [*range(1, 41, 5)], [*range(1, 41)], [*range(1, 41)]]
    assert run_ranks(2, _rhythm) == [expected] * 2


def test_another_number_of_flags_is_an_error() -> None:
    with pytest.raises(DistributedError, match="2 flags, but got 3"):
        AsyncFlags(Processes.start(), size=2).exchange((1, 0, 0))


class AskedMeanwhile(AsyncFlags):
    """A handler of a signal asks while the flags are on their way."""

    requests: Requests

    @override
    def exchange(self, flags: Sequence[int]) -> None:
        super().exchange(flags)
        self.requests.own.stop, self.requests.own.evaluation = "a signal", True


def test_what_is_asked_while_flags_are_sent_comes_with_the_next() -> None:
    processes = Processes.start()
    flags = AskedMeanwhile(processes, size=4)
    flags.requests = requests = Requests()
    requests.own.checkpoint = True
    requests.send(flags, 0)
    requests.read(flags, processes)
    assert (requests.stop, requests.evaluation, requests.checkpoint) == (None, False, True)
    requests.send(flags, 0)
    requests.read(flags, processes)
    assert (requests.stop, requests.evaluation) == ("a signal", True)
