"""Tests of gathering: each real sample once, in the order of one process (DESIGN 2.19)."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.distributed.gather_cases import COLLATES, Case, random_case, same
from tests.helpers.ranks import run_ranks
from trainkit.distributed import Processes, concatenate, gather_samples, gather_tensors, guard
from trainkit.distributed.rows import Memory
from trainkit.errors import DataError, DistributedError


def check_case(case: Case, processes: Processes) -> list[str]:
    """Gather batch by batch and all at once; return what differs from one process."""
    collate = COLLATES[case.kind]
    batches = case.global_batches()
    computed = [collate(samples) for samples in case.computed(processes.rank)]
    sizes = [len(samples) for samples in case.computed(processes.rank)]
    counts = [case.counts(batch) for batch in batches]
    wrong = []
    memory: Memory = {}
    for index, batch in enumerate(batches):
        got = gather_samples(
            processes,
            computed[index : index + 1],
            counts[index : index + 1],
            sizes[index : index + 1],
            pad_value=-100,
            memory=memory,
        )
        if not same(got, collate(batch)):
            wrong.append(f"{case}, batch {index}: {got} instead of {collate(batch)}")
    got = gather_samples(processes, computed, counts, sizes, pad_value=-100)
    expected = collate(list(range(case.length))) if batches else []
    if not same(got, expected):
        wrong.append(f"{case}, all batches: {got} instead of {expected}")
    return wrong


def check_cases(rank: int, cases: list[Case]) -> list[str]:
    processes = Processes.start()
    return [text for case in cases for text in check_case(case, processes)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_length_and_batch_size_gives_the_list_of_one_process(size: int) -> None:
    kinds = list(COLLATES)
    cases = [
        Case(kinds[(length * 5 + batch_size) % len(kinds)], length, size, batch_size)
        for length in range(34)
        for batch_size in range(1, 6)
    ]
    assert run_ranks(size, check_cases, cases) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_cases_of_every_kind_give_the_list_of_one_process(size: int) -> None:
    cases = [random_case(seed, size) for seed in range(100)]
    cases += [Case(kind, length, size, 2) for kind in COLLATES for length in (1, 2, 3, 9)]
    assert run_ranks(size, check_cases, cases) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ten_thousand_random_cases_give_the_list_of_one_process(size: int) -> None:
    for start in range(0, 2500, 250):
        cases = [random_case(size * 100_000 + start + seed, size) for seed in range(250)]
        assert run_ranks(size, check_cases, cases, timeout=300) == [[]] * size


def _errors(rank: int, values: list[Any], sizes: list[int]) -> str:
    processes = Processes.start()
    with pytest.raises(DataError) as caught:
        gather_samples(processes, [values[rank]], [tuple(sizes)], [sizes[rank]], name="outputs")
    assert processes.all_gather_bytes(b"still together") == [b"still together"] * processes.size
    return str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor(0.5), "`outputs` is a Tensor of shape (), but the batch has 4 samples"),
        (0.5, "`outputs` is the float 0.5, but the batch has 4 samples"),
        ("text", "`outputs` is a str, but"),
        (None, "`outputs` is a NoneType, but"),
        (torch.ones(3, 4), "`outputs` is a Tensor of shape (3, 4), but the batch has 4"),
        (["a", "b"], "`outputs` is a list of length 2, but the batch has 4 samples"),
        ([], "`outputs` is a list of length 0, but the batch has 4 samples"),
        ([None, None], "`outputs` is a list of length 2, but the batch has 4 samples"),
        ((torch.ones(4), torch.tensor(1)), "`outputs[1]` is a Tensor of shape (), but"),
        ({"a": [torch.ones(4), {"loss": 1.0}]}, "`outputs['a'][1]['loss']` is the float 1.0"),
        ([lambda: 1] * 4, "`builtins.function` cannot be pickled"),
        ({"b": torch.ones(4)}, "`outputs` is a Tensor of 1 dimensions on process 0"),
        (torch.ones(4, 2), "is a Tensor of 1 dimensions on process 0 (batch 0), but a Tensor of 2"),
    ],
    ids=str,
)
def test_an_error_on_one_process_is_raised_on_all(bad: Any, message: str) -> None:
    first, second = run_ranks(2, _errors, [torch.ones(4), bad], [4, 4])
    assert first == second
    assert message in first


def test_the_error_names_the_weighted_form() -> None:
    with pytest.raises(DataError, match=r"sums and counts, or call `run.log\(value, weight=n\)`"):
        gather_samples(Processes.start(), [torch.tensor(1.0)], [(2,)], [2])


def test_a_value_that_contains_itself_is_an_error_on_all() -> None:
    value: list[Any] = []
    value.append(value)
    first, second = run_ranks(2, _errors, [torch.ones(4), value], [4, 4])
    assert first == second
    assert "RecursionError" in first


def _one_has_nothing(rank: int, value: Any) -> Any:
    values = [torch.arange(6).view(2, 3), value]
    return gather_samples(Processes.start(), [values[rank]], [(2, 0)], [2])


@pytest.mark.parametrize("value", [None, torch.tensor(1.0), {"other": torch.ones(2)}], ids=str)
def test_what_a_process_without_real_samples_computes_does_not_matter(value: Any) -> None:
    for gathered in run_ranks(2, _one_has_nothing, value):
        assert torch.equal(gathered, torch.arange(6).view(2, 3))


def _none_has_any(rank: int, odd: bool) -> Any:
    value = {"x": torch.ones(2, 3, dtype=torch.bfloat16), "names": ["a", "b"]}
    batch = None if odd and rank == 0 else value
    return gather_samples(Processes.start(), [batch], [(0, 0)], [2])


@pytest.mark.parametrize("odd", [False, True])
def test_without_any_real_sample_structure_dtype_and_later_dimensions_are_kept(odd: bool) -> None:
    for gathered in run_ranks(2, _none_has_any, odd):
        assert same(gathered, {"x": torch.empty(0, 3, dtype=torch.bfloat16), "names": []})


def test_without_any_real_sample_and_without_structure_there_is_an_error() -> None:
    with pytest.raises(DataError, match="`value` is a NoneType, but the batch has 2 samples"):
        gather_samples(Processes.start(), [None], [(0,)], [2])


def _local_class(rank: int) -> tuple[str, int]:
    @dataclass
    class Local:
        scores: torch.Tensor

    gathered = gather_samples(Processes.start(), [Local(torch.ones(2))], [(2, 2)], [2])
    return type(gathered).__qualname__, len(gathered.scores)


def test_containers_may_be_of_a_class_defined_in_a_function() -> None:
    assert run_ranks(2, _local_class) == [("_local_class.<locals>.Local", 4)] * 2


def _ambiguous(rank: int) -> list[Any]:
    processes = Processes.start()
    square = [torch.full((2,), rank), torch.full((2,), rank)]
    only_entries = [torch.ones(3), torch.ones(1)]
    mixed = square if rank == 0 else only_entries
    memory: Memory = {}
    lists = [
        gather_samples(processes, [square], [(2, 2)], [2], memory=memory),
        gather_samples(processes, [mixed], [(2, 2)], [2], memory=memory),
        gather_samples(processes, [square], [(2, 2)], [2], memory=memory),
    ]
    return [[item.tolist() for item in items] for items in lists]


def test_an_ambiguous_list_is_decided_by_the_others_and_by_what_came_before() -> None:
    alone, mixed, after = run_ranks(2, _ambiguous)[1]
    assert alone == [[0, 0, 1, 1], [0, 0, 1, 1]]  # two tensors of four rows
    assert mixed == [[0, 0], [0, 0], [1, 1, 1], [1]]  # four entries
    assert after == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_on_one_process_the_same_objects_come_back() -> None:
    value = {"x": torch.ones(2, 3), "objects": [object(), lambda: 1]}
    assert gather_samples(Processes.start(), [value], [(2,)], [2]) is value


def test_on_one_process_padding_is_cut_too() -> None:
    gathered = gather_samples(Processes.start(), [(torch.arange(4), list("abcd"))], [(3,)], [4])
    assert same(gathered, (torch.arange(3), list("abc")))


def test_an_ambiguous_list_is_cut_either_way() -> None:
    processes, value = Processes.start(), [torch.ones(2), torch.zeros(2)]
    container = gather_samples(processes, [value], [(1,)], [2])
    assert same(container, [torch.ones(1), torch.zeros(1)])
    entries = gather_samples(processes, [value], [(1,)], [2], memory={"value": "samples"})
    assert same(entries, [torch.ones(2)])


def _mixed_dtypes(rank: int) -> Any:
    value = torch.ones(1, dtype=torch.float64 if rank else torch.float32)
    return gather_samples(Processes.start(), [value], [(1, 1)], [1]).dtype


def test_unequal_dtypes_are_promoted_alike_on_all_processes() -> None:
    assert run_ranks(2, _mixed_dtypes) == [torch.float64] * 2


def _gather_tensors(rank: int) -> Any:
    processes = Processes.start()
    value = {"loss": torch.tensor(float(rank)), "rows": [torch.full((rank + 1, 2), rank)]}
    with pytest.raises(DataError, match=r"unequal later dimensions.*pad_across_processes"):
        gather_tensors(processes, torch.ones(1, rank + 1))
    with pytest.raises(DataError, match=r"On process 1: `value` is a str"):
        gather_tensors(processes, "text" if rank else torch.ones(1))
    return gather_tensors(processes, value)


def test_tensors_are_joined_along_the_first_dimension() -> None:
    expected = {
        "loss": torch.tensor([0.0, 1.0]),
        "rows": [torch.tensor([[0, 0], [1, 1], [1, 1]])],
    }
    assert all(same(gathered, expected) for gathered in run_ranks(2, _gather_tensors))


def test_gathering_inside_the_code_of_some_processes_is_an_error() -> None:
    with guard.only("on_main_process"), pytest.raises(DistributedError, match="gather_for_metrics"):
        gather_samples(Processes.start(), [torch.ones(1)], [(1,)], [1])


def test_concatenate_joins_gathered_values() -> None:
    first = {"x": torch.ones(2, 1), "names": ["a", "b"]}
    second = {"x": torch.zeros(1, 3), "names": ["c"]}
    expected = {"x": torch.tensor([[1.0, 9, 9], [1, 9, 9], [0, 0, 0]]), "names": list("abc")}
    assert same(concatenate([first, second], pad_value=9), expected)
    assert same(concatenate([(torch.ones(2),), (torch.ones(1),)]), (torch.ones(3),))
    assert same(concatenate([["a", "b"], ["c"]]), list("abc"))
    assert concatenate([]) == []
