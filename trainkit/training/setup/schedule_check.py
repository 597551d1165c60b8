"""What a schedule comes to in a run, and whether that can be meant (rule 10)."""

import copy
import warnings
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer, lr_scheduler

from trainkit.basics.torch_internals import parts_of_schedule, set_parts_of_schedule
from trainkit.errors import ConfigError
from trainkit.training.lr_schedule import LRSchedule, LRSchedules

_FALLING = ("StepLR", "MultiStepLR", "ExponentialLR", "PolynomialLR", "LinearLR")
# What says where a schedule ends, and which part of a run is strangely early for it.
_ENDS = {"total_steps": 1.0, "T_max": 0.9, "total_iters": 0.6, "step_size": 0.6, "milestones": 0.6}


def describe(schedule: LRSchedule | LRSchedules, steps: int | None, epochs: int | None) -> str:
    """Return what a schedule is, and its first, highest and last rate in a run, from a copy.

    Functions that a user wrote are not called: then only the present rate is told.
    """
    return "\n".join(
        f"{name}{': ' if name else ''}{_describe(one, updates, epochs)}"
        for name, one, updates in schedule.each(steps)
    )


def _describe(schedule: LRSchedule, steps: int | None, epochs: int | None) -> str:
    by_step = schedule.every == "step" and schedule.metric is None
    text = f"{schedule.name}{' every update' if by_step else ''}: "
    count = steps if by_step else epochs
    if schedule.metric is not None or not count or not _is_known(schedule.scheduler):
        return text + _span([group["lr"] for group in schedule.scheduler.optimizer.param_groups])
    rates = _rates(schedule.scheduler, count)
    peak = [max(of_group) for of_group in zip(*rates.values(), strict=True)]
    return f"{text}first {_span(rates[0])}, peak {_span(peak)}, last {_span(rates[count - 1])}"


def check_plan(
    schedule: LRSchedule | LRSchedules,
    steps: int | None,
    epochs: int | None,
    say: Callable[[str], None],
) -> None:
    """Say, or raise ConfigError, where a schedule hardly can, or cannot, be meant for a run.

    Nothing is said of schedules of functions, nor of those that are put together from others.
    """
    for _, one, updates in schedule.each(steps):
        _check_plan(one, updates, epochs, say)


def _check_plan(
    schedule: LRSchedule, steps: int | None, epochs: int | None, say: Callable[[str], None]
) -> None:
    scheduler, by_step = schedule.scheduler, schedule.every == "step"
    count, other = (steps, epochs or 0) if by_step else (epochs, steps or 0)
    if schedule.metric is not None or count is None or not _is_known(scheduler):
        return
    unit, others = ("update", "epochs") if by_step else ("epoch", "updates")
    name, length = _length(scheduler)
    repeats = name in ("step_size", "milestones") and not (by_step and length < other)
    early = not repeats and length < count * _ENDS.get(name, 0)
    # Nobody has said the unit: then a length that fits the other one is taken for a mistake.
    refused = schedule.unit_is_assumed
    meant = ', or if it is meant so, return `LRSchedule(scheduler, every="step")`' * refused
    if early and name == "total_steps":
        problem, refused = "it cannot go on after its end", True
        meant = f", or let the run end with it by `Trainer(max_steps={length})`" * by_step
    elif 0 < length == other != count and (early or not by_step):
        problem = f"that is the number of {others}"
    elif _is_gone(scheduler, count):
        problem = "after half of them the rate is below a millionth of the optimizer's"
    elif early:
        problem = (
            "it ends long before" if length > other else f"that looks like a number of {others}"
        )
        refused = False
    elif length > count * 1.1:
        problem, refused = "the run is over long before its end", False
    else:
        return
    text = (
        f"`{schedule.name}`{f' has `{name}={length}`,' if name else ''} advances with each {unit}, "
        f"and {count} {unit}s are planned: {problem}. To advance it by epochs, return "
        '`LRSchedule(scheduler, every="epoch")` from the `lr_scheduler` callable; by updates, take '
        "its length from `trainer.planned_steps`, or pass a schedule by name, such as "
        f'`lr_scheduler="cosine"`{meant}. A resume stretches it with `schedule="rescale"`.'
    )
    if refused:
        raise ConfigError(text)
    say(f"trainkit: {text}")


def _is_gone(scheduler: Any, count: int) -> bool:
    """Return whether nothing is left of the rates after half of `count` advances."""
    if type(scheduler).__name__ not in _FALLING:
        return False
    rates = zip(_rates(scheduler, count // 2 + 1)[count // 2], scheduler.base_lrs, strict=True)
    return all(rate <= 1e-6 * base for rate, base in rates)


def settings_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same settings of groups, but no parameters of a model."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return SGD([copy.deepcopy(group) | {"params": [torch.zeros(())]} for group in groups], lr=0.0)


def _length(scheduler: Any) -> tuple[str, int]:
    """Return after how many advances a schedule is at its end, and what says so."""
    name = next((name for name in _ENDS if hasattr(scheduler, name)), "")
    rises = getattr(scheduler, "end_factor", 0) >= getattr(scheduler, "start_factor", 1)
    if rises or isinstance(scheduler, lr_scheduler.ConstantLR) or not getattr(scheduler, name, 0):
        return "", 0
    return name, max(scheduler.milestones) if name == "milestones" else getattr(scheduler, name)


def _is_known(scheduler: Any) -> bool:
    """Return whether no user wrote any of it, so that it can be copied and asked for any rate."""
    functions = [getattr(f, "func", f) for f in getattr(scheduler, "lr_lambdas", ())]
    packages = [str(getattr(part, "__module__", "")) for part in (type(scheduler), *functions)]
    known = all(name.startswith(("torch.", "trainkit.", "transformers.")) for name in packages)
    known = known and not isinstance(scheduler, lr_scheduler.ChainedScheduler)  # goes by its past
    return known and all(map(_is_known, getattr(scheduler, "_schedulers", ())))


def _rates(scheduler: Any, count: int) -> dict[int, list[float]]:
    """Return the rates of all groups after so many advances, wherever they are highest too."""
    twin = _twin(scheduler, settings_of(scheduler.optimizer))
    # It knows nothing of groups that the run has added to its optimizer.
    first = (parts_of_schedule(scheduler)[0] or [scheduler])[0]
    del twin.optimizer.param_groups[len(first.base_lrs) :]
    width = max(1, count // 1000)  # so many are looked at
    steps, rates = [*range(0, count, width), count - 1], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no update comes before, and jumps are old-fashioned
        for _ in range(2):
            for step in steps:
                _move(twin, step)
                rates[step] = [float(group["lr"]) for group in twin.optimizer.param_groups]
            best = max(rates, key=lambda step: max(rates[step]))
            steps = [*range(max(0, best - width), min(count, best + width))]
    return rates


def _twin(scheduler: Any, optimizer: Optimizer) -> Any:
    twin = copy.copy(scheduler)
    twin.optimizer = optimizer
    if parts := parts_of_schedule(twin)[0]:
        set_parts_of_schedule(twin, [_twin(part, optimizer) for part in parts])
    return twin


def _move(twin: Any, step: int) -> None:
    if isinstance(twin, lr_scheduler.SequentialLR):
        parts, milestones = parts_of_schedule(twin)
        index = bisect_right(milestones, step)
        _move(parts[index], step - [0, *milestones][index])
    else:
        twin.step(step)


def _span(rates: list[float]) -> str:
    low, high = f"{min(rates):.3g}", f"{max(rates):.3g}"
    return low if low == high else f"{low} to {high}"
