"""Tests of the accelerator's verbs, on one process and on several."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.ranks import in_turn, run_ranks
from trainkit.accelerator.accelerator import Accelerator
from trainkit.errors import ConfigError, DataError, DistributedError

SIZES = [1, 3]


def _who(rank: int) -> tuple[Any, ...]:
    accelerator = Accelerator(device="cpu")
    return (
        accelerator.process_index,
        accelerator.local_process_index,
        accelerator.num_processes,
        accelerator.is_main_process,
        accelerator.is_local_main_process,
        accelerator.is_last_process,
        accelerator.device,
    )


@pytest.mark.parametrize("size", SIZES)
def test_each_process_knows_its_place(size: int) -> None:
    last, device = size - 1, torch.device("cpu")
    assert run_ranks(size, _who) == [
        (rank, rank, size, rank == 0, rank == 0, rank == last, device) for rank in range(size)
    ]


def _verbs(rank: int) -> dict[str, Any]:
    accelerator = Accelerator()
    tensor = torch.tensor([float(rank)])
    padded = accelerator.pad_across_processes({"x": torch.ones(1, rank + 1)}, dim=1, pad_index=9)
    first = accelerator.pad_across_processes(torch.ones(rank + 1), pad_index=9, pad_first=True)
    return {
        "gather": accelerator.gather({"loss": tensor[0]})["loss"].tolist(),
        "objects": accelerator.gather_object([rank, Path("x")]),
        "sum": accelerator.reduce([tensor], scale=2.0)[0].item(),
        "mean": accelerator.reduce(tensor, reduction="mean").item(),
        "kept": tensor.item(),
        "broadcast": accelerator.broadcast((torch.tensor(rank + 5),))[0].item(),
        "padded": padded["x"].tolist(),
        "first": first.tolist(),
        "none": accelerator.pad_across_processes(torch.tensor(3), dim=1).item(),
    }


@pytest.mark.parametrize("size", SIZES)
def test_collectives_give_all_processes_the_same(size: int) -> None:
    ranks = list(range(size))
    for rank, results in enumerate(run_ranks(size, _verbs)):
        assert results["gather"] == ranks
        assert results["objects"] == [item for rank in ranks for item in (rank, Path("x"))]
        assert results["sum"] == 2 * sum(ranks)
        assert results["mean"] == sum(ranks) / size
        assert results["kept"] == rank
        assert results["broadcast"] == 5
        assert results["padded"] == [[1.0] * (rank + 1) + [9.0] * (size - rank - 1)]
        assert results["first"] == [9.0] * (size - rank - 1) + [1.0] * (rank + 1)
        assert results["none"] == 3


def _metrics(rank: int) -> tuple[Any, ...]:
    accelerator = Accelerator()
    everything = accelerator.gather_for_metrics(torch.tensor([rank]))
    names = accelerator.gather_for_metrics([f"rank {rank}"])
    loader = object()
    accelerator.loaders.began(loader)
    accelerator.loaders.yielded(loader, (2, 1), 2 - rank)
    logits, labels = accelerator.gather_for_metrics(
        (torch.full((2 - rank, 2), rank), torch.full((2 - rank,), rank))
    )
    accelerator.loaders.yielded(loader, (1, 0), 1)
    repeated = accelerator.gather_for_metrics([torch.full((1, rank + 1), rank)], loader=loader)
    accelerator.loaders.yielded(loader, (2, 2), 2)
    forced = accelerator.gather_for_metrics([torch.ones(2), torch.ones(2)], use_gather_object=True)
    return (
        everything.tolist(),
        names,
        logits.shape,
        labels.tolist(),
        [item.tolist() for item in repeated],
        len(forced),
    )


def test_gather_for_metrics_knows_the_real_samples_of_the_loader_under_way() -> None:
    expected = ([0, 1], ["rank 0", "rank 1"], (3, 2), [0, 0, 1], [[[0]]], 4)
    assert run_ranks(2, _metrics) == [expected] * 2


def test_a_value_that_fits_another_loader_under_way_is_refused_and_loader_is_named() -> None:
    accelerator = Accelerator()
    first, second = object(), object()
    for loader, count in ((first, 2), (second, 3)):
        accelerator.loaders.began(loader)
        accelerator.loaders.yielded(loader, (count,), count)
    assert accelerator.gather_for_metrics(torch.ones(3)).shape == (3,)
    with pytest.raises(DataError, match=r"the batch has 3 samples.* 2 loaders .*`loader=`"):
        accelerator.gather_for_metrics(torch.ones(2))
    assert accelerator.gather_for_metrics(torch.ones(2), loader=first).shape == (2,)


def _on_some(rank: int, folder: Path) -> dict[str, Any]:
    accelerator = Accelerator()
    ran = []

    @accelerator.on_main_process
    def main(value: int) -> int:
        """Documented."""
        ran.append("main")
        return value

    assert main.__doc__ == "Documented."
    returned = main(7)
    accelerator.on_last_process(lambda: ran.append("last"))()
    accelerator.on_process(lambda: ran.append("one"), process_index=1)()
    accelerator.on_process(process_index=99)(lambda: ran.append("nobody"))()
    accelerator.on_local_process(local_process_index=1)(lambda: ran.append("local one"))()
    accelerator.on_local_main_process(lambda: ran.append("local main"))()
    with accelerator.main_process_first():
        seen = (folder / "made").exists()
        (folder / "made").touch()
    return {"ran": ran, "returned": returned, "seen": seen}


def test_decorated_functions_run_on_their_processes(tmp_path: Path) -> None:
    first, second = run_ranks(2, _on_some, tmp_path)
    assert first == {"ran": ["main", "local main"], "returned": 7, "seen": False}
    assert second == {"ran": ["last", "one", "local one"], "returned": None, "seen": True}


def _collective_on_main(rank: int) -> list[str]:
    accelerator = Accelerator()
    calls = [
        lambda: accelerator.gather(torch.ones(1)),
        lambda: accelerator.gather_for_metrics(torch.ones(1)),
        lambda: accelerator.gather_object([1]),
        lambda: accelerator.reduce(torch.ones(1)),
        lambda: accelerator.broadcast(torch.ones(1)),
        lambda: accelerator.pad_across_processes(torch.ones(1)),
        lambda: accelerator.wait_for_everyone(),
    ]
    messages = []
    for call in calls:
        try:
            accelerator.on_main_process(call)()
        except DistributedError as error:
            messages.append(str(error).split("`")[1])
    with accelerator.local_main_process_first():
        try:
            accelerator.gather(torch.ones(1))
        except DistributedError as error:
            messages.append(str(error).split("`")[3])
    return messages


def test_a_collective_on_some_processes_raises_with_its_name() -> None:
    names = ["gather", "gather", "gather_object", "reduce", "broadcast"]
    names += ["pad_across_processes", "wait_for_everyone", "local_main_process_first"]
    first, second = run_ranks(2, _collective_on_main)
    assert first == names
    assert second == names[-1:]


def _main_raises(rank: int) -> int:
    accelerator = Accelerator()
    try:
        with accelerator.main_process_first():
            if rank == 0:
                raise ValueError("unwell")
    except ValueError:
        pass
    return int(accelerator.gather(torch.ones(1)).sum())


def test_an_error_in_the_first_turn_does_not_hold_the_others() -> None:
    assert run_ranks(2, _main_raises) == [2, 2]


def _split(rank: int, inputs: Any, apply_padding: bool) -> Any:
    with Accelerator().split_between_processes(inputs, apply_padding=apply_padding) as part:
        return part


@pytest.mark.parametrize("size", SIZES)
def test_split_parts_are_consecutive_and_complete(size: int) -> None:
    lengths = (0, 1, 2, 5, 6)
    ranks = run_ranks(size, in_turn, _split, [([*range(length)], False) for length in lengths])
    for length, parts in zip(lengths, zip(*ranks, strict=True), strict=True):
        assert [item for part in parts for item in part] == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_split_takes_dicts_and_tensors_and_pads_with_the_last() -> None:
    inputs: dict[str, Any] = {"x": torch.arange(4), "names": ("a", "b", "c", "d")}
    parts = run_ranks(3, _split, inputs, True)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [3, 3]]
    names = [part["names"] for part in parts]
    assert names == [("a", "b"), ("c", "d"), ("d", "d")]
    assert inputs["x"].tolist() == [0, 1, 2, 3]


def test_only_the_main_process_prints(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, lambda rank: Accelerator().print("hello", rank))
    printed = capfd.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith("[Gloo]")] == ["hello 0"]  # torch 2.10


def _unwrap(rank: int) -> bool:
    accelerator = Accelerator()
    model = nn.Linear(1, 1).to(accelerator.device)
    wrapped = DistributedDataParallel(model)
    return accelerator.unwrap_model(wrapped) is model is accelerator.unwrap_model(model)


def test_unwrap_model_returns_the_module_inside() -> None:
    assert all(run_ranks(2, _unwrap))


def test_bad_arguments_are_named() -> None:
    accelerator = Accelerator()
    with pytest.raises(ConfigError, match="`reduction` must be"):
        accelerator.reduce(torch.ones(1), reduction="median")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="`object` must be a list or tuple, but is a dict"):
        accelerator.gather_object({"a": 1})
    with pytest.raises(ConfigError, match="`process_index` must be the number of a process"):
        accelerator.on_process(print)
    with pytest.raises(DataError, match=r"`tensor\['a'\]` is a float"):
        accelerator.reduce({"a": 1.0})
    with pytest.raises(DataError, match=r"lengths are \{'a': 1, 'b': 2\}"):
        _split(0, OrderedDict(a=[1], b=[1, 2]), False)
