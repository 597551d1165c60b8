"""What a process sends and opens as processes are added: counted, never timed."""

import math
import os
import resource
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import make_trainer, toy_dataset, toy_model
from trainkit import ConfigError
from trainkit.data import training_loader
from trainkit.distributed import Processes, run_on_all, run_on_main
from trainkit.distributed.collectives import gather_on_main, ranks_with, require_equal
from trainkit.distributed.gloo_listeners import LAZY
from trainkit.errors import DataError, by_process
from trainkit.training.logging import LogSums

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the counters of Linux")

CPU = torch.device("cpu")
_SENT, _SEGMENTS = ("Q", 200, 208), ("I", 156, 100)  # in tcp_info: all, and what was sent again


def sent() -> tuple[int, int, int]:
    """Return the bytes and messages that this process has sent, and its connections."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                counts = [
                    [struct.unpack_from(form, info, at)[0] for at in places]
                    for form, *places in (_SENT, _SEGMENTS)
                ]
                found.append([every - again for every, again in counts])
    return sum(b for b, _ in found), sum(m for _, m in found), len(found)


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(256.0).view(-1, 1))


def _logged(processes: Processes, *more: str) -> None:
    sums = LogSums()
    for name in more:
        sums.add(name, 5.0)
    sums.add("loss", torch.tensor(1.0 + processes.rank))
    sums.add("worst", float("nan") if processes.rank == 1 else 1.0, reduce="max")
    sums.add("best", float(processes.rank), reduce="max")
    sums.add("last", float(processes.rank), reduce="last")
    figures = sums.reduce(processes)
    assert figures["loss"] == (1 + processes.size) / 2
    assert math.isnan(figures["worst"])
    assert (figures["best"], figures["last"]) == (processes.size - 1, 0)
    assert [*figures] == sorted(figures)


def _read_stream(processes: Processes) -> None:
    loader = DataLoader(Numbers(), batch_size=2)
    prepared = training_loader(loader, processes=processes, device=CPU, seed=0)
    for window in prepared.windows(0):
        for micro_batch in window:
            assert micro_batch.total == 2 * processes.size
        if micro_batch.total:
            break


def _evaluated(processes: Processes) -> None:
    loader = DataLoader(toy_dataset(processes.size * 4), batch_size=4)
    make_trainer().evaluate(toy_model(), loader, loss_fn=torch.nn.CrossEntropyLoss())


ACTIONS: dict[str, Callable[[Processes], Any]] = {
    "compare": lambda processes: require_equal(processes, {"a": 1}, lambda of_all: None),
    "act on all": lambda processes: run_on_all(processes, lambda: None),
    "act on one": lambda processes: run_on_main(processes, lambda: "x" * 300),
    "log": _logged,
    "stream": _read_stream,
    "evaluate": _evaluated,
}


def _count(rank: int) -> dict[str, tuple[int, int, int]]:
    processes = Processes.start(device=CPU)
    counts = {"start": sent()}
    for name, action in ACTIONS.items():
        processes.barrier()
        action(processes)  # connects
        before = sent()
        action(processes)
        counts[name] = tuple(b - a for a, b in zip(before, sent(), strict=True))  # type: ignore[assignment]
    counts["connections"] = sent()
    processes.barrier()
    return counts


@pytest.mark.e2e
def test_what_a_process_sends_grows_at_most_as_the_logarithm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(LAZY, "1")  # as in jobs of more than 64 processes
    counts = [run_ranks(size, _count) for size in (2, 4, 8)]
    for name in counts[0][0]:
        # Process 0 greets those that connect to it, one by one.
        ranks = [of[name in ("start", "connections") :] for of in counts]
        for column, noise in enumerate((200, 4, 0)):
            two, four, eight = (max(rank[name][column] for rank in of) for of in ranks)
            # Linear growth would double.
            assert eight - four <= 1.5 * max(four - two, 0) + noise, (name, two, four, eight)


def _differ(rank: int) -> list[Any]:
    processes = Processes.start(device=CPU)
    told: list[Any] = []
    with pytest.raises(DataError) as caught:
        require_equal(processes, rank % 3, lambda of_all: DataError(by_process(of_all)))
    told.append(str(caught.value))
    told.append(ranks_with(processes, rank % 2 == 1))
    told.append(gather_on_main(processes, "x" * 100 * rank, lambda of_all: [*map(len, of_all)]))
    with pytest.raises(ZeroDivisionError if rank == 0 else Exception, match="division"):
        gather_on_main(processes, rank, lambda of_all: 1 // 0)

    def fail() -> None:
        if rank:
            raise ConfigError(f"of {rank}")

    with pytest.raises(ConfigError) as failed:
        run_on_all(processes, fail)
    told.append(str(failed.value) if rank in (0, 2) else None)
    require_equal(processes, rank, lambda of_all: None)  # they may differ so
    _logged(processes, *["mine"] * (rank == 0))  # what one process alone logs
    return told


def test_what_differs_is_told_to_process_0_which_tells_all() -> None:
    told = run_ranks(3, _differ)
    words = "process 0: 0; process 1: 1; process 2: 2"
    lengths = [0, 100, 200]
    assert told == [
        [words, [1], lengths, "On process 1: of 1"],
        [words, [1], lengths, None],
        [words, [1], lengths, "of 2"],
    ]


def test_of_many_processes_few_are_named() -> None:
    assert by_process([1] * 12 + [2] * 4) == ("process 0: 1; process 12: 2; and 14 more processes")


def _limited(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    Processes.start(device=CPU)


def _raised(rank: int) -> tuple[int, int]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    Processes.start(device=CPU).barrier()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0], hard


def test_the_limit_of_descriptors_is_raised_or_refused() -> None:
    for soft, hard in run_ranks(2, _raised):
        assert soft == hard
    with pytest.raises(RanksError, match="at most 100 files and connections, but in a job of 2 "):
        run_ranks(2, _limited)
