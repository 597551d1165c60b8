"""The same scripts under Accelerate and under trainkit do the same, but where they should not.

Each row of `behaviours` runs on both, on one, two and three processes. `DIFFERENCES` is the whole
list of what trainkit does otherwise on purpose, with what it does instead; a difference that is
gone from Accelerate fails as well. docs/migrating-from-accelerate.md says the same in words.
"""

from collections.abc import Callable
from typing import Any

import pytest

import tests.accelerator.further_behaviours
from tests.accelerator.behaviours import BEHAVIOURS, SIDES, run_all
from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few

theirs = late("accelerate.utils")
assert tests.accelerator.further_behaviours.__doc__  # which adds its rows to `BEHAVIOURS`

Results = dict[str, list[Any]]  # by the name of a behaviour, what each process returned
Expected = Callable[[Results, int], bool]

ON_THREE = (
    "order(",
    "gathered_for_metrics(",
    "random_loop(",
    "verbs(",
)  # the rest needs only two
SIZES = (1, 2, 3)


def _is(value: Any) -> Callable[[str], Expected]:
    return lambda name: lambda results, size: results[name] == [value] * size


def _length_is_exact(name: str) -> Expected:
    """`len(loader)` is the number of batches that come."""
    return lambda results, size: all(len(epochs[0]) == length for epochs, length in results[name])


def _samples_differ(name: str) -> Expected:
    """No two samples draw the same, on whatever process."""

    def holds(results: Results, size: int) -> bool:
        drawn = [tuple(sample) for of_process in results[name] for sample in of_process]
        return len(drawn) == len(set(drawn)) == 4 + (-4) % size

    return holds


def _last_update_is_whole(name: str) -> Expected:
    return lambda results, size: all(set(found) == {1.0} for found in results[name])


def _as_if_nobody_had_left(name: str) -> Expected:
    other = name.replace("True", "False")
    return lambda results, size: results[name] == results[other]


def _skips_are_seen(name: str) -> Expected:
    expected = [False, True, False]
    return lambda results, size: results[name] == [(expected, True, 2 * size, 2.0**9)] * size


def _texts_are_gathered(name: str) -> Expected:
    def holds(results: Results, size: int) -> bool:
        texts = [text for batch in results[name][0] for text in batch["text"]]
        return texts == [str(number) for number in range(4 * size + 1)]

    return holds


def _refused(name: str) -> Expected:
    return lambda results, size: all("raises DataError" in found for found in results[name])


def _whole_first_round(name: str) -> Expected:
    return lambda results, size: all(
        found == [[float(n) for n in range(4 * size)]] for found in results[name]
    )


def _nothing(name: str) -> Expected:
    return lambda results, size: all(found == [] for found, _ in results[name])


def _all_come_shuffled(name: str) -> Expected:
    def holds(results: Results, size: int) -> bool:
        numbers = [number for of_process in results[name] for number in of_process]
        return sorted(numbers) == list(range(8)) != numbers

    return holds


# Names begin so; on which numbers of processes; why; and what trainkit does.
DIFFERENCES: list[tuple[str, tuple[int, ...], str, Callable[[str], Expected]]] = [
    (
        "order(length=1, split=True, even=False, drop_last=False)",
        (2, 3),
        "`len` counts only batches that come, also where some processes have fewer",
        _length_is_exact,
    ),
    ("order(length=2, split=True, even=False, drop_last=False)", (2, 3), "", _length_is_exact),
    ("order(length=13, split=True, even=False, drop_last=False)", (2, 3), "", _length_is_exact),
    ("augmentation(", (1, 2), "each sample has random numbers of its own", _samples_differ),
    (
        "resumed_in_an_epoch(config=plain)",
        (1,),
        "a resumed epoch goes on in its order, and so do those after it",
        _is(True),
    ),
    ("resumed_in_an_epoch(config=seedable)", (1, 2), "", _is(True)),
    (
        "last_window(length=18)",
        (1, 2),
        "a loss is divided by the micro-batches that its window has",
        _last_update_is_whole,
    ),
    ("last_window(length=12)", (2,), "", _last_update_is_whole),
    (
        "windows_around_an_evaluation(leaves=True)",
        (1, 2),
        "leaving an evaluation early does not lose the last update of the training loader",
        _as_if_nobody_had_left,
    ),
    ("overflow(fused=True)", (1, 2), "a fused optimizer's skip is seen", _skips_are_seen),
    (
        "gathered_other_things(what=dict of lists)",
        (2,),
        "lists in a dict are gathered, not its keys",
        _texts_are_gathered,
    ),
    (
        "gathered_other_things(what=mean)",
        (1, 2),
        "a mean over a batch is refused: the mean of means is biased",
        _refused,
    ),
    (
        "gathered_other_things(what=uneven)",
        (2,),
        "each process knows which samples of all are real",
        _whole_first_round,
    ),
    ("gathered_scalar(", (1,), "one process gathers what several would", _is([3])),
    ("dispatched(length=0, ", (1, 2), "no batch at all is no error", _nothing),
    ("dispatched(length=1, split=False, drop_last=True", (1, 2), "", _nothing),
    ("dispatched(length=1, split=True, drop_last=True", (1, 2), "", _nothing),
    ("dispatched(length=2, split=False, drop_last=True", (2,), "", _nothing),
    ("dispatched(length=2, split=True, drop_last=True", (1, 2), "", _nothing),
    ("dispatched(length=5, split=True, drop_last=True", (1, 2), "", _nothing),
    (
        "shuffled_without_a_batch_size(",
        (1, 2),
        "a sampler beside `batch_size=None` is not lost",
        _all_come_shuffled,
    ),
    ("prepared_stateful(", (1,), "`prepare` draws no random number", _is(True)),
    ("scaled_mean(", (1, 2), "`scale` acts, and not on TPUs alone", _is([2.0])),
]


def _is_run(name: str, size: int) -> bool:
    return size == 1 or (name.startswith(ON_THREE) if size == 3 else "batch_sizes" not in name)


def _difference(name: str, size: int) -> Expected | None:
    for prefix, sizes, _, make in DIFFERENCES:
        if name.startswith(prefix) and size in sizes:
            return make(name)
    return None


@pytest.mark.e2e
@pytest.mark.parametrize("size", with_few([1], SIZES))
def test_both_do_the_same(size: int) -> None:
    """All rows in one test: each other worker of pytest would start the processes again."""
    names = [name for name in BEHAVIOURS if _is_run(name, size)]
    sides: dict[str, Results] = {}
    for side in SIDES:
        ranks = run_ranks(size, run_all, side, names)
        sides[side] = {name: [rank[name] for rank in ranks] for name in names}
    assert not [problem for name in names if (problem := _problem(name, size, **sides))]


def _problem(name: str, size: int, trainkit: Results, accelerate: Results) -> str:
    """Return what is not as it should be of a row, or nothing."""
    ours, theirs = trainkit[name], accelerate[name]
    expected = _difference(name, size)
    if expected is None:
        is_right = ours == theirs and "raises" not in str(ours)
        return "" if is_right else f"{name}: {ours}, under Accelerate {theirs}"
    if ours == theirs:
        return f"{name}: Accelerate does the same now: take it off the list"
    return "" if expected(trainkit, size) else f"{name}: {ours}"


def test_the_list_of_differences_names_what_exists() -> None:
    for prefix, *_ in DIFFERENCES:
        assert any(name.startswith(prefix) for name in BEHAVIOURS), prefix
