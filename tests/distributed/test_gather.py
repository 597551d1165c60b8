"""Tests of gathering: each real sample once, in the order of one process (rule 19)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

from tests.distributed.gather_cases import COLLATES, ONE_EACH, Case, random_case, same
from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from trainkit.containers.sample_rows import Merge, Origin, parse
from trainkit.distributed import (
    Processes,
    collective_guard,
    concatenate,
    gather_samples,
    gather_tensors,
)
from trainkit.distributed.communicator import Communicator
from trainkit.errors import DataError, DistributedError


def merged(values: list[Any], pad_value: float | None = None) -> Any:
    known: dict[str, type] = {}
    nodes = [parse(value, None, "value", known) for value in values]
    origins = [Origin(0, batch) for batch in range(len(nodes))]
    return Merge(known, pad_value=pad_value)(nodes, origins, "value")


def check_case(case: Case, processes: Processes) -> list[str]:
    """Gather batch by batch and all at once; return what differs from one process."""
    collate = COLLATES[case.kind]
    batches = case.global_batches()
    computed = [collate(samples) for samples in case.computed(processes.rank)]
    sizes = [len(samples) for samples in case.computed(processes.rank)]
    counts = [case.counts(batch) for batch in batches]
    wrong = []
    one_each = case.kind in ONE_EACH
    for index, batch in enumerate(batches):
        got = gather_samples(
            processes,
            computed[index : index + 1],
            counts[index : index + 1],
            sizes[index : index + 1],
            pad_value=-100,
            use_gather_object=one_each,
        )
        if not same(got, collate(batch)):
            wrong.append(f"{case}, batch {index}: {got} instead of {collate(batch)}")
    got = gather_samples(
        processes, computed, counts, sizes, pad_value=-100, use_gather_object=one_each
    )
    expected = collate(list(range(case.length))) if batches else []
    if not same(got, expected):
        wrong.append(f"{case}, all batches: {got} instead of {expected}")
    return wrong


def check_cases(rank: int, cases: list[Case]) -> list[str]:
    processes = Processes.start()
    return [text for case in cases for text in check_case(case, processes)]


@pytest.mark.parametrize("size", with_few([2], [1, 2, 4]))
def test_every_length_and_batch_size_gives_the_list_of_one_process(size: int) -> None:
    kinds = list(COLLATES)
    cases = [
        Case(kinds[(length * 5 + batch_size) % len(kinds)], length, size, batch_size)
        for length in range(34)
        for batch_size in range(1, 6)
    ]
    assert run_ranks(size, check_cases, cases) == [[]] * size


@pytest.mark.e2e
@pytest.mark.parametrize("size", with_few([2], [1, 2, 4]))
def test_random_cases_of_every_kind_give_the_list_of_one_process(size: int) -> None:
    cases = [random_case(seed, size) for seed in range(100)]
    cases += [Case(kind, length, size, 2) for kind in COLLATES for length in (1, 2, 3, 9)]
    assert run_ranks(size, check_cases, cases) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize("size", with_few([3], [1, 2, 3, 4]))
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


_endless: list[Any] = []
_endless.append(_endless)

ERRORS: list[tuple[Any, str]] = [
    (_endless, "RecursionError"),
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
    (numpy.ma.masked_array([1, 2, 3, 4]), "`outputs` is a masked array, whose mask"),
    ([lambda: 1] * 4, "`builtins.function` cannot be sent to other processes without pickle"),
    ({"b": torch.ones(4)}, "`outputs` is a Tensor of 1 dimensions on process 0"),
    (torch.ones(4, 2), "is a Tensor of 1 dimensions on process 0 (batch 0), but a Tensor of 2"),
]


def test_an_error_on_one_process_is_raised_on_all() -> None:
    cases = [([torch.ones(4), bad], [4, 4]) for bad, _ in ERRORS]
    first, second = run_ranks(2, in_turn, _errors, cases)
    assert first == second
    assert [
        message for (_, message), text in zip(ERRORS, first, strict=True) if message not in text
    ] == []


def test_the_error_names_the_weighted_form() -> None:
    with pytest.raises(DataError, match=r"sums and counts, or call `run.log\(value, weight=n\)`"):
        gather_samples(Processes.start(), [torch.tensor(1.0)], [(2,)], [2])


def _one_has_nothing(rank: int, value: Any) -> Any:
    values = [torch.arange(6).view(2, 3), value]
    return gather_samples(Processes.start(), [values[rank]], [(2, 0)], [2])


def test_what_a_process_without_real_samples_computes_does_not_matter() -> None:
    cases = [(None,), (torch.tensor(1.0),), ({"other": torch.ones(2)},)]
    for results in run_ranks(2, in_turn, _one_has_nothing, cases):
        assert all(torch.equal(gathered, torch.arange(6).view(2, 3)) for gathered in results)


def _none_has_any(rank: int, odd: bool) -> Any:
    value = {"x": torch.ones(2, 3, dtype=torch.bfloat16), "names": ["a", "b"]}
    batch = None if odd and rank == 0 else value
    return gather_samples(Processes.start(), [batch], [(0, 0)], [2])


def test_without_any_real_sample_structure_dtype_and_later_dimensions_are_kept() -> None:
    expected = {"x": torch.empty(0, 3, dtype=torch.bfloat16), "names": []}
    for results in run_ranks(2, in_turn, _none_has_any, [(False,), (True,)]):
        assert all(same(gathered, expected) for gathered in results)


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


def _gather(value: Any, size: int, **options: Any) -> Any:
    return gather_samples(Processes.start(), [value], [(size, size)], [size], **options)


def _columns(rank: int) -> Any:
    values = torch.arange(6.0).view(3, 2)[rank : rank + 1, 1]  # one element, and a stride of 2
    both = torch.arange(12.0).view(1, 3, 2, 2).permute(0, 3, 1, 2)[:, :1]
    return _gather(values, 1).tolist(), _gather(both, 1).flatten().tolist()


def test_one_row_of_a_column_is_gathered() -> None:
    assert run_ranks(2, _columns) == [([1.0, 3.0], [0.0, 2, 4, 6, 8, 10] * 2)] * 2


def _after_texts(rank: int) -> Any:
    predictions, references = torch.tensor([rank, rank]), torch.tensor([5, 6])
    before = _gather(["a", "b"], 2)
    texts = _gather((["a", "b"], ["c", "d"]), 2)
    return before, texts, [part.tolist() for part in _gather((predictions, references), 2)]


def test_what_a_call_means_does_not_depend_on_the_calls_before() -> None:
    texts = (["a", "b"] * 2, ["c", "d"] * 2)
    expected = (["a", "b"] * 2, texts, [[0, 0, 1, 1], [5, 6, 5, 6]])
    assert run_ranks(2, _after_texts) == [expected] * 2


def _square(rank: int) -> Any:
    tensors = [torch.full((2,), rank), torch.full((2,), rank)]
    as_fields = [_gather(tensors, 2), list(_gather(tuple(tensors), 2))]
    as_entries = _gather(tensors, 2, use_gather_object=True)
    wrapped = _gather([{"value": tensor} for tensor in tensors], 2)
    return (
        [[field.tolist() for field in fields] for fields in as_fields],
        [entry.tolist() for entry in as_entries],
        [entry["value"].tolist() for entry in wrapped],
    )


def test_a_list_with_tensors_holds_fields_whatever_its_length_unless_told_otherwise() -> None:
    fields, entries = [[0, 0, 1, 1]] * 2, [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert run_ranks(2, _square) == [([fields, fields], entries, entries)] * 2


@pytest.mark.parametrize(
    ("value", "way"),
    [
        ([torch.ones(1), torch.ones(3)], "`[{'value': entry} for entry in x]`, or give the list"),
        ([[torch.ones(2)], [torch.ones(3)]], "with `use_gather_object=True`"),
        (({"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(1, 4)}), "`list(x)`"),
        (([7], [8, 9]), "`list(x)`"),
        ([["a"], ["b"], ["c"]], "`tuple(x)`"),
        ([{"a": torch.ones(2)}], "`tuple(x)`"),
    ],
)
def test_an_error_says_how_the_other_reading_is_written(value: Any, way: str) -> None:
    with pytest.raises(DataError) as caught:
        gather_samples(Processes.start(), [value], [(2,)], [2], name="x")
    assert way in str(caught.value)


FILLED = [
    (torch.float32, math.nan),
    (torch.bfloat16, math.nan),
    (torch.float16, math.nan),
    (torch.complex64, complex(math.nan, 0)),
    (torch.int8, -100),
    (torch.int64, -100),
]


def _ragged_rows(rank: int, dtype: torch.dtype) -> tuple[bool, str]:
    rows = _gather(torch.ones(1, 1 + rank, dtype=dtype), 1)
    return rows.dtype == dtype, repr(rows.tolist())


def test_rows_of_different_width_are_filled_with_what_cannot_be_data() -> None:
    ones = [(torch.ones(1, dtype=dtype).item(), fill) for dtype, fill in FILLED]
    expected = [(True, repr([[one, fill], [one, one]])) for one, fill in ones]
    cases = [(dtype,) for dtype, _ in FILLED]
    assert run_ranks(2, in_turn, _ragged_rows, cases) == [expected] * 2


def test_arrays_are_filled_in_the_same_way() -> None:
    for dtype, fill in (("int16", "-100"), ("float32", "nan"), ("complex128", "(nan+0j)")):
        rows = [numpy.ones((1, width), dtype=dtype) for width in (1, 2)]
        assert repr(merged(rows).tolist()[0][1]) == fill
    for kind in ("bool", "uint8", "U1", "object", "datetime64[s]"):
        rows = [numpy.ones((1, width)).astype("int64").astype(kind) for width in (1, 2)]
        with pytest.raises(DataError, match="has rows of different width"):
            merged(rows)


def _unfillable(rank: int, dtype: torch.dtype) -> tuple[str, Any]:
    value = torch.ones(1, 1 + rank, dtype=dtype)
    with pytest.raises(DataError) as caught:
        _gather(value, 1, name="x")
    return str(caught.value), _gather(value, 1, pad_value=0).tolist()


def test_rows_whose_type_has_no_such_value_are_refused() -> None:
    dtypes = (torch.bool, torch.uint8, torch.uint16)
    for results in run_ranks(2, in_turn, _unfillable, [(dtype,) for dtype in dtypes]):
        for dtype, (message, filled) in zip(dtypes, results, strict=True):
            assert message.startswith(f"`x` has rows of different width, and {dtype} has no value")
            assert "`pad_value=`" in message
            assert filled == [[1, 0], [1, 1]]


def test_filling_goes_by_the_type_that_comes_out() -> None:
    rows = [torch.ones(1, 1, dtype=torch.uint8), torch.ones(1, 2, dtype=torch.int64)]
    assert merged(rows).tolist() == [[1, -100], [1, 1]]
    rows[1] = torch.ones(1, 2)
    assert repr(merged(rows).tolist()) == "[[1.0, nan], [1.0, 1.0]]"


@pytest.mark.parametrize("value", [0.5, math.nan, 300, -1])
def test_a_pad_value_that_the_type_cannot_hold_is_refused(value: float) -> None:
    rows = [torch.ones(1, 1, dtype=torch.uint8), torch.ones(1, 2, dtype=torch.uint8)]
    with pytest.raises(DataError, match=r"`pad_value` is .* a whole number from 0 to 255"):
        merged(rows, pad_value=value)


def test_on_one_process_the_same_objects_come_back() -> None:
    value = {"x": torch.ones(2, 3), "objects": [object(), lambda: 1]}
    assert gather_samples(Processes.start(), [value], [(2,)], [2]) is value


def test_on_one_process_padding_is_cut_too() -> None:
    gathered = gather_samples(Processes.start(), [(torch.arange(4), list("abcd"))], [(3,)], [4])
    assert same(gathered, (torch.arange(3), list("abc")))


def _mixed_dtypes(rank: int) -> Any:
    value = torch.ones(1, dtype=torch.float64 if rank else torch.float32)
    return gather_samples(Processes.start(), [value], [(1, 1)], [1]).dtype


def test_unequal_dtypes_are_promoted_alike_on_all_processes() -> None:
    assert run_ranks(2, _mixed_dtypes) == [torch.float64] * 2


def _floats_and_integers(rank: int) -> Any:
    value = torch.tensor([0.5]) if rank else torch.tensor([2**24 + 1])
    with pytest.raises(DataError, match=r"torch.float32, torch.int64 .*rounds large whole numbers"):
        gather_tensors(Processes.start(), value)
    nothing = torch.tensor([2**24 + 1]) if rank else torch.tensor([])  # float32, as torch makes it
    small = torch.tensor([7], dtype=torch.uint8) if rank else torch.tensor([0.5])
    return [gather_tensors(Processes.start(), each) for each in (nothing, small)]


def test_whole_numbers_are_never_rounded_by_joining_them_to_others() -> None:
    expected = [torch.tensor([2**24 + 1]), torch.tensor([0.5, 7.0])]
    assert all(same(gathered, expected) for gathered in run_ranks(2, _floats_and_integers))


def _unlike(rank: int) -> None:
    verbs = Communicator()
    for call in (verbs.reduce, verbs.broadcast):
        with pytest.raises(
            DataError, match=r"process 0: tensor float32\[2\]; process 1: tensor fl"
        ):
            call(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
        with pytest.raises(
            DataError, match=r"\['b'\] float32\[1\]; process 1: .*\['b'\] float32\[2\]"
        ):
            call({"a": torch.ones(1), "b": torch.ones(rank + 1)})
        with pytest.raises(DataError, match="process 1: `tensor` is a float, but must be a tensor"):
            call(1.0 if rank else torch.ones(1))
    assert verbs.reduce(torch.ones(2)).tolist() == [2, 2]


def test_what_is_reduced_or_broadcast_has_one_form_on_all_processes() -> None:
    run_ranks(2, _unlike)


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
    with (
        collective_guard.only("on_main_process"),
        pytest.raises(DistributedError, match="gather_for_metrics"),
    ):
        gather_samples(Processes.start(), [torch.ones(1)], [(1,)], [1])


def test_concatenate_joins_gathered_values() -> None:
    first = {"x": torch.ones(2, 1), "names": ["a", "b"]}
    second = {"x": torch.zeros(1, 3), "names": ["c"]}
    expected = {"x": torch.tensor([[1.0, 9, 9], [1, 9, 9], [0, 0, 0]]), "names": list("abc")}
    assert same(merged([first, second], pad_value=9), expected)
    assert same(concatenate([(torch.ones(2),), (torch.ones(1),)]), (torch.ones(3),))
    assert same(concatenate([["a", "b"], ["c"]], [2, 1]), list("abc"))
    assert concatenate([]) == []
