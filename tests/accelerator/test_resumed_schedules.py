"""A schedule goes on where it was, however many processes share its batches now."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader

from tests.accelerator.toys import numbers
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator


def _decays(optimizer: Any, length: int) -> Any:
    return LambdaLR(optimizer, lambda count: 1 - count / length)


def _cycles(optimizer: Any, length: int) -> Any:
    return OneCycleLR(optimizer, max_lr=1.0, total_steps=length)


def _steps(optimizer: Any, length: int) -> Any:
    return StepLR(optimizer, length // 4, gamma=0.5)


SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "a function": _decays,
    "cosine": CosineAnnealingLR,
    "one cycle": _cycles,
    "steps": _steps,
}


def _rates(
    rank: int, folder: Path, batch: int, micro: int, kept: str, stop: int | None
) -> dict[str, list[float]]:
    """Train 96 samples, or go on with that, once for each schedule; return the rates used."""
    found: dict[str, list[float]] = {}
    for name, make in SCHEDULES.items():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro)
        model, loader = nn.Linear(1, 1), DataLoader(numbers(96), batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = make(optimizer, len(loader) // micro)
        parts = accelerator.prepare(model, optimizer, schedule, loader)
        model, optimizer, schedule, loader = parts
        place, skipped, rates = folder / name, 0, list[float]()
        noted, together = folder / f"{name}.txt", batch * accelerator.num_processes
        if place.exists():
            accelerator.load_state(place)
            skipped = int(noted.read_text()) // together
        for inputs in accelerator.skip_first_batches(loader, skipped):
            with accelerator.accumulate(model):
                rates.append(optimizer.param_groups[0]["lr"])
                accelerator.backward(0 * model(inputs[0]).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if len(rates) == stop:
                accelerator.save_state(place)
                noted.write_text(str((skipped + stop) * together))
                break
        found[name] = rates[:: micro if kept == "window" else 1]
    return found


def _goes_on(folder: Path, *jobs: tuple[int, int, int], kept: str) -> None:
    """Compare a training that goes on in other layouts with one that is never stopped."""
    whole = run_ranks(jobs[0][0], _rates, folder / "whole", *jobs[0][1:], kept, None)[0]
    parts = []
    for number, (size, batch, micro) in enumerate(jobs):
        stop = None if number == len(jobs) - 1 else 4 * micro
        parts.append(run_ranks(size, _rates, folder, batch, micro, kept, stop)[0])
    for name, rates in whole.items():
        found = [rate for part in parts for rate in part[name]]
        if kept == "samples":  # each update of two processes has twice as many
            rates = rates[:4] + rates[4::2] if jobs[0][0] < jobs[1][0] else rates
        assert found == pytest.approx(rates, abs=1e-12), (name, found, rates)


@pytest.mark.parametrize(("before", "after"), with_few([(1, 2)], [(2, 1), (1, 2)]))
def test_a_schedule_goes_on_where_the_global_batch_stays(
    before: int, after: int, tmp_path: Path
) -> None:
    _goes_on(tmp_path, (before, 4 // before, 1), (after, 4 // after, 1), kept="window")


@pytest.mark.e2e
def test_a_schedule_goes_on_twice(tmp_path: Path) -> None:
    _goes_on(tmp_path, (1, 4, 1), (2, 2, 1), (2, 2, 1), (1, 4, 1), kept="window")


@pytest.mark.e2e
def test_a_schedule_goes_on_where_accumulation_makes_up_for_processes(tmp_path: Path) -> None:
    _goes_on(tmp_path, (2, 2, 1), (1, 2, 2), kept="window")


@pytest.mark.e2e
def test_a_schedule_goes_by_samples_where_a_window_has_more_of_them(tmp_path: Path) -> None:
    _goes_on(tmp_path, (1, 4, 1), (2, 4, 1), kept="samples")
