"""Runs a program by hand, by trainkit, and once more from a checkpoint, and compares.

Some are trained in a loop of one's own too, and resumed there.
"""

import contextlib
import io
import math
import shutil
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.ranks import RanksError, run_ranks
from tests.right_programs import by_hand, by_own_loop, by_trainkit
from tests.right_programs.by_hand import Outcome
from tests.right_programs.models import make_model
from tests.right_programs.program import Program, draw

__all__ = ["after_resume", "problems", "run_seeds"]

_ROUNDING = 1e-15  # of float64, in which programs with sums in another order are trained
_AMPLIFIED = 100
"""How many times as far as a loop by hand from weights that are moved by a rounding.

A line search, or a gradient of 0 that is divided by its own size, makes much of a rounding.
"""

_OF_TORCH = ("Sparse invariant checks", "FSDP2-wrapped module", "Grad strides do not match")
"""What torch warns of by itself."""


def run_seeds(seeds: list[int], processes: int, folder: Path) -> dict[int, list[str]]:
    """Return what is wrong with the programs of some seeds, where anything is."""
    if processes == 1:
        found = [_run_here(0, seeds, 1, folder)]
    else:
        try:
            found = run_ranks(processes, _run_here, seeds, processes, folder, timeout=600)
        except RanksError as error:  # some wait for one that has left: the others run again
            if len(seeds) == 1:
                return {seeds[0]: [str(error)]}
            half = len(seeds) // 2
            return {
                seed: texts
                for index, part in enumerate((seeds[:half], seeds[half:]))
                for seed, texts in run_seeds(part, processes, folder / str(index)).items()
            }
    by_seed = {
        seed: [f"process {rank}: {text}" for rank, own in enumerate(found) for text in own[seed]]
        for seed in seeds
    }
    return {seed: texts for seed, texts in by_seed.items() if texts}


def _run_here(rank: int, seeds: list[int], processes: int, folder: Path) -> dict[int, list[str]]:
    return {seed: problems(draw(seed, processes), folder / str(seed), rank) for seed in seeds}


def problems(program: Program, folder: Path, rank: int = 0) -> list[str]:
    """Return, in words, what is wrong with how trainkit runs a program; every process calls it.

    A warning is an error.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("error")
            for text in _OF_TORCH:
                warnings.filterwarnings("ignore", text)
            found = by_trainkit.fit(program, folder)
            resumed = _resumed(program, folder)
            own = [*_own_loop(program, folder / "own")] if by_own_loop.fits(program) else []
    except Exception:
        return [traceback.format_exc()]
    if rank:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules, where the first step is skipped
        expected = by_hand.train(program)
        wrong = [*_differences(program, expected, found)]
        if wrong and not program.is_exact:
            nearby = by_hand.train(program, moved=_ROUNDING)
            wrong = [*_differences(program, expected, found, nearby)]
    return [*wrong, *after_resume(found, *resumed), *own]


def _resumed(p: Program, folder: Path) -> tuple[int, Outcome | None]:
    """Go on from one of the checkpoints; return its step, and what that comes to."""
    saved = sorted((folder / "checkpoints").glob("step-*"))
    if not saved:
        return 0, None
    chosen = saved[p.flags % len(saved)]
    step = int(chosen.name.removeprefix("step-").partition(".")[0])
    if p.processes > 1:
        return step, by_trainkit.fit(p, folder / "resumed", chosen)
    for later in saved[saved.index(chosen) + 1 :]:
        shutil.rmtree(later)
    return step, by_trainkit.fit(p, folder, "must")


def _own_loop(p: Program, folder: Path) -> Iterator[str]:
    """Yield what a loop of one's own has not in common with one that is resumed."""
    stop = 1 + p.flags % by_own_loop.batches(p)
    whole = by_own_loop.train(p, folder, stop)
    for text in after_resume(whole, stop, by_own_loop.train(p, folder, stop, resume=True)):
        yield f"loop of one's own: {text}"


def after_resume(whole: Outcome, step: int, resumed: Outcome | None) -> Iterator[str]:
    """Yield in what a run that was resumed from a step, if one was, is not the whole one."""
    if resumed is None:
        return
    for name in ("weights", "state", "average", "rates", "counters", "predictions"):
        first, second = (dict(_entries(getattr(each, name))) for each in (whole, resumed))
        wrong = [k for k in {*first, *second} if not _is_same(first.get(k), second.get(k))]
        if wrong:
            yield f"resumed from step {step}: {name} {wrong} differ"
    for name in ("evaluations", "logs"):
        # Where the run was at its end, what was logged after the save is logged again.
        one, other = ([e for e in getattr(o, name) if e[0] > step] for o in (whole, resumed))
        if repr(one) != repr(other):
            yield f"resumed from step {step}: {name} {one}, then {other}"


def _entries(values: dict[str, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return values.items() if isinstance(values, dict) else enumerate(values)


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        layouts = [
            [step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1]
            for x in (one, other)
        ]
        are_equal = torch.equal(one.nan_to_num(1e9), other.nan_to_num(1e9))
        return are_equal and layouts[0] == layouts[1]
    return one == other


def _differences(
    p: Program, expected: Outcome, found: Outcome, nearby: Outcome | None = None
) -> Iterator[str]:
    """Yield what trainkit and the loop by hand do not have in common.

    Args:
        p: The program.
        expected: By hand.
        found: By trainkit.
        nearby: By hand from weights that were moved by a rounding.
    """
    start = make_model(p).state_dict()
    moved = max(_distance(x, start[name]) for name, x in expected.weights.items())
    halves = p.precision != "fp32"
    # Sums in another order round otherwise, which in half precision may flip a rounding.
    of_weights, of_state, of_metrics, noise = 0.0, 0.0, 1e-5, 0.0
    if not p.is_exact:
        of_weights, of_state, of_metrics, noise = 1e-8, 1e-7, 1e-8, 1e-6
    if not p.is_exact and halves:
        of_weights, of_state, of_metrics, noise = 0.1 * moved, 0.2, 0.1, 0.01
    if expected.counters != found.counters:
        yield f"counters: {expected.counters} by hand, {found.counters} by trainkit"
    near = nearby or expected
    limits = {"weights": (of_weights,), "state": (0.0, of_state, noise), "average": (of_weights,)}
    for name in limits if p.ema is not None else ("weights", "state"):
        one, other, third = (dict(_entries(getattr(o, name))) for o in (expected, found, near))
        yield from _tensors(name, one, other, third, *limits[name])
    if not all(map(_is_near, expected.rates, found.rates)):
        yield f"rates: {expected.rates} by hand, {found.rates} by trainkit"
    for name in ("evaluations", "logs"):
        one, other, third = (getattr(outcome, name) for outcome in (expected, found, near))
        counts = p.is_exact or not halves
        yield from _records(name, one, other, third, of_metrics, counts=counts)
    predictions = expected.predictions, found.predictions[0], near.predictions
    yield from _predictions(*predictions, of_metrics)


def _tensors(
    what: str,
    expected: dict[Any, Tensor],
    found: dict[Any, Tensor],
    nearby: dict[Any, Tensor],
    limit: float,
    relative: float = 0.0,
    noise: float = 0.0,
) -> Iterator[str]:
    """Yield which tensors differ by more than a limit, or a part of their size.

    Args:
        noise: What is smaller counts as so large: sums that should be 0.
    """
    if expected.keys() != found.keys():
        yield f"{what}: {sorted(expected.keys() ^ found.keys())} are there in one only"
    for name in expected.keys() & found.keys():
        allowed = limit + relative * max(_size(expected[name]), noise)
        if name in nearby:
            allowed += _AMPLIFIED * _distance(expected[name], nearby[name])
        if (distance := _distance(expected[name], found[name])) > allowed:
            yield f"{what}: {name} differs by {distance:.3g}, more than {allowed:.3g}"


Records = list[tuple[int, dict[str, float]]]


def _records(
    what: str, expected: Records, found: Records, nearby: Records, near: float, *, counts: bool
) -> Iterator[str]:
    """Yield which figures differ; `counts` says whether those that jump are looked at."""
    keys = [[(step, sorted(values)) for step, values in each] for each in (expected, found)]
    if keys[0] != keys[1]:
        yield f"{what}: {keys[0]} by hand, {keys[1]} by trainkit"
        return
    moved = {(step, name): value for step, values in nearby for name, value in values.items()}
    for (step, values), (_, others) in zip(expected, found, strict=True):
        for name, value in values.items():
            if name in ("eval/accuracy", "eval/share") and not counts:
                continue
            by_rounding = _AMPLIFIED * abs(value - moved.get((step, name), value))
            if not (_is_near(value, others[name], near) or abs(value - others[name]) < by_rounding):
                yield f"{what} at {step}: {name} {value} by hand, {others[name]} by trainkit"


def _predictions(
    batches: list[Tensor], found: Tensor, nearby: list[Tensor], near: float
) -> Iterator[str]:
    """Yield which scores differ; those of ragged rows are filled up to the longest of all."""
    begin = 0
    for batch, moved in zip(batches, nearby, strict=True):
        own = found[begin : begin + len(batch)]
        own = own[:, : batch.shape[1]] if batch.ndim == 3 else own
        allowed = near * max(1.0, _size(batch)) + _AMPLIFIED * _distance(batch, moved)
        if (distance := _distance(batch, own)) > allowed:
            yield f"predictions from {begin} on differ by {distance:.3g}"
        begin += len(batch)
    if begin != len(found):
        yield f"{len(found)} predictions of {begin} samples"


def _is_near(one: float, other: float, near: float = 1e-12) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=near, abs_tol=near * 1e-2)


def _size(x: Tensor) -> float:
    return float(x.double().nan_to_num(0.0).abs().max()) if x.numel() else 0.0


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference; infinite where shapes, dtypes or places of NaN differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    one, other = one.double(), other.double()
    if not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    return _size(torch.where(one == other, 0.0, one - other))
