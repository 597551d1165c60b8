"""Tests of the collectives, on one process and on several."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed

from tests.helpers.ranks import RanksError, run_ranks
from trainkit.distributed import Processes, collective_guard
from trainkit.distributed.processes import Reduction
from trainkit.errors import ConfigError, DistributedError

SIZES = [1, 3]


def _reductions(rank: int) -> dict[str, Any]:
    processes = Processes.start()
    results: dict[str, Any] = {}
    ops: list[Reduction] = ["sum", "mean", "max", "min"]
    for op in ops:
        tensor = torch.tensor([1.0, 2.0], dtype=torch.float64) * (rank + 1)
        assert processes.all_reduce(tensor, op) is tensor
        results[op] = tensor.tolist()
    transposed = torch.arange(6).view(2, 3).t() + rank
    processes.all_reduce(transposed)
    results["transposed"] = transposed.tolist()
    pending = processes.all_reduce_async(torch.ones(2, requires_grad=True), "mean")
    results["pending"] = pending.wait().tolist()
    return results


@pytest.mark.parametrize("size", SIZES)
def test_reductions(size: int) -> None:
    numbers = range(1, size + 1)
    for results in run_ranks(size, _reductions):
        assert results["sum"] == [sum(numbers), 2 * sum(numbers)]
        assert results["mean"] == [sum(numbers) / size, 2 * sum(numbers) / size]
        assert results["max"] == [size, 2 * size]
        assert results["min"] == [1, 2]
        expected = torch.arange(6).view(2, 3).t() * size + sum(range(size))
        assert results["transposed"] == expected.tolist()
        assert results["pending"] == [1.0, 1.0]


LENGTHS = [0, 3, 500, 504, 505, 2000, 3, 70_000, 400_000, 10, 10, 10, 10, 1 << 18]


def _gather_bytes(rank: int) -> tuple[list[list[int]], int]:
    processes = Processes.start()
    return [
        [len(part) for part in processes.all_gather_bytes(bytes([rank]) * (length * (rank + 1)))]
        for length in LENGTHS
    ], processes._capacity


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_any_length_reach_all_processes(size: int) -> None:
    results = run_ranks(size, _gather_bytes)
    expected = [[length * (rank + 1) for rank in range(size)] for length in LENGTHS]
    assert all(lengths == expected for lengths, _ in results)
    assert len({capacity for _, capacity in results}) == 1


def _collectives_of_a_gather(rank: int) -> list[int]:
    processes = Processes.start()
    calls = []
    plain = torch.distributed.all_gather
    counts = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    torch.distributed.all_gather = counted
    for length in (504, 600, 700, 650, 10, 900, 700):
        before = len(calls)
        payload = bytes(range(256)) * 4
        assert processes.all_gather_bytes(payload[:length])[0] == payload[:length]
        counts.append(len(calls) - before)
    return counts


def test_gathering_bytes_takes_one_collective_once_the_size_is_known() -> None:
    assert run_ranks(2, _collectives_of_a_gather) == [[1, 2, 1, 1, 1, 2, 1]] * 2


def _objects(rank: int) -> tuple[Any, ...]:
    processes = Processes.start()
    value = {"rank": rank, "tensor": torch.full((rank,), rank), "loss": float("nan")}
    gathered = processes.all_gather_objects(value)
    last = processes.size - 1
    return (
        [item["rank"] for item in gathered],
        [item["tensor"].shape[0] for item in gathered],
        processes.broadcast_object(("from", rank), last),
        processes.broadcast(torch.full((2, 3), rank).t(), last).tolist(),
    )


@pytest.mark.parametrize("size", SIZES)
def test_objects_are_gathered_and_broadcast(size: int) -> None:
    ranks, last = list(range(size)), size - 1
    expected = (ranks, ranks, ("from", last), [[last, last]] * 3)
    assert run_ranks(size, _objects) == [expected] * size


def _unencodable_on_one(rank: int) -> list[str]:
    processes = Processes.start()
    messages = []
    with pytest.raises(DistributedError) as gathered:
        processes.all_gather_objects([object()] if rank == 1 else [rank])
    messages.append(str(gathered.value))
    with pytest.raises(DistributedError) as broadcast:
        processes.broadcast_object(object() if rank == 1 else None, source=1)
    messages.append(str(broadcast.value))
    return messages


def test_a_value_that_cannot_travel_raises_on_all_processes() -> None:
    first, second = run_ranks(2, _unencodable_on_one)
    assert first == second
    assert first[0].startswith("The value of process 1 cannot travel. At `value[0]`: A `builtins")


def _user_group(rank: int, size: int, init: str) -> tuple[Any, ...]:
    torch.distributed.init_process_group("gloo", init, rank=rank, world_size=size)
    processes = Processes.start()
    seen = (processes.rank, processes.size, processes.owned, Processes.start() is processes)
    total = processes.all_reduce(torch.ones(1)).item()
    processes.close()
    alive = torch.distributed.is_initialized()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return (*seen, total, alive)


def test_a_group_of_the_user_is_adopted_and_left_alone(tmp_path: Any) -> None:
    results = run_ranks(2, _user_group, 2, f"file://{tmp_path}/init")
    assert results == [(rank, 2, False, True, 2.0, True) for rank in range(2)]


def _start_again(rank: int) -> list[float]:
    totals = []
    for _ in range(3):
        processes = Processes.start()
        assert processes.owned
        totals.append(processes.all_reduce(torch.ones(1)).item())
        processes.barrier()
        processes.close()
        assert not torch.distributed.is_initialized()
    return totals


def test_processes_can_be_closed_and_started_again() -> None:
    assert run_ranks(2, _start_again) == [[2.0, 2.0, 2.0]] * 2


def test_one_process_makes_no_group() -> None:
    processes = Processes.start()
    assert processes is Processes.start()
    assert (processes.size, processes.control, processes.owned) == (1, None, False)
    value = object()
    assert processes.all_gather_objects(value)[0] is value
    processes.barrier()
    processes.close()
    assert not torch.distributed.is_initialized()


def test_a_fork_does_not_use_the_processes_of_its_parent() -> None:
    alone = Processes.start()
    assert run_ranks(2, lambda rank: Processes.start().size) == [2, 2]
    assert Processes.start() is alone


def _in_a_fork(rank: int) -> int:
    processes = Processes.start(device=torch.device("cpu"))
    child = os.fork() if rank == 0 else None  # as a worker of a loader or of `datasets` is
    if child == 0:
        signal.alarm(20)  # should it wait for the others
        code = 1
        try:
            there = Processes.start()
            assert (there.rank, there.size, there.device) == (0, 2, processes.device)
            with pytest.raises(DistributedError, match="a copy of what another process made"):
                there.barrier()
            code = 0
        finally:
            os._exit(code)
    processes.barrier()
    return 0 if child is None else os.waitpid(child, 0)[1]


def test_a_child_of_a_member_knows_its_place_and_waits_for_nobody() -> None:
    assert run_ranks(2, _in_a_fork) == [0, 0]


def test_a_rendezvous_without_address_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    Processes.start().close()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"asks for 2 processes.*torchrun"):
        Processes.start()


def test_bad_arguments_are_named() -> None:
    processes = Processes.start()
    with pytest.raises(ConfigError, match="`op` must be one of sum, mean, max, min"):
        processes.all_reduce(torch.ones(1), "avg")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"floating-point tensor, but its dtype is torch.int64"):
        processes.all_reduce(torch.ones(1, dtype=torch.int64), "mean")
    with pytest.raises(ConfigError, match=r"in \[0, 1\), but is 1"):
        processes.broadcast(torch.ones(1), 1)


def _collective_inside(rank: int) -> str:
    processes = Processes.start()
    if rank == 0:
        with collective_guard.only("on_main_process"), pytest.raises(DistributedError) as caught:
            processes.all_reduce(torch.ones(1))
        processes.barrier()
        return str(caught.value)
    processes.barrier()
    return ""


def test_a_collective_in_code_of_some_processes_raises_at_once() -> None:
    message = run_ranks(2, _collective_inside)[0]
    assert message.startswith("`all_reduce` was called inside `on_main_process`")


def test_the_guard_ends_with_its_block_and_names_the_inner_one() -> None:
    with collective_guard.only("outer"):
        with pytest.raises(DistributedError, match="`inner`"), collective_guard.only("inner"):
            collective_guard.check("gather")
        with pytest.raises(DistributedError, match="`outer`"):
            collective_guard.check("gather")
    collective_guard.check("gather")


def _leave_early(rank: int) -> None:
    processes = Processes.start()
    if rank == 1:
        raise ValueError("unwell")
    processes.all_reduce(torch.ones(1))


def test_a_rank_that_raises_frees_the_others_from_a_collective() -> None:
    with pytest.raises(RanksError, match=r"rank 1 of 2: raised(.|\n)*unwell"):
        run_ranks(2, _leave_early)


def _join_with_other_checks(rank: int) -> None:
    if rank == 1:
        os.environ["TRAINKIT_DEBUG"] = "1"
    with pytest.raises(
        ConfigError, match="different kinds: process 0: gloo, debug level OFF; proc"
    ):
        Processes.start()
    os.environ.pop("TRAINKIT_DEBUG", None)
    debugging: Any = torch.distributed  # not all of its names are declared
    debugging.set_debug_level(debugging.DebugLevel.OFF)
    assert Processes.start().all_reduce(torch.ones(1)).item() == 3


def test_checks_of_torch_on_one_process_only_are_refused_on_all() -> None:
    run_ranks(3, _join_with_other_checks)
