"""Every setting that decides the numbers of a run, and the rule behind it, in words."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from trainkit.config import TrainConfig
from trainkit.distributed.communicator import Communicator
from trainkit.precision import Precision
from trainkit.strategies import Strategy
from trainkit.training.callback import CallbackList

__all__ = ["Explained", "rules"]


class Explained(Protocol):
    """A trainer, as far as it is looked at."""

    processes: Communicator
    callbacks: CallbackList
    config: TrainConfig
    output_dir: Path | None
    planned_steps: int | None
    precision: Precision
    strategy: Strategy


def rules(trainer: Explained, model: nn.Module | None) -> Iterator[tuple[str, str]]:
    """Yield every setting that changes numbers, and the rule behind it."""
    config = trainer.config
    for name, text in _MEANINGS.items():
        value = getattr(config, name)
        mark = "" if value == _DEFAULTS[name] else "* "
        shown = f"{value:g}" if isinstance(value, float) else value
        yield f"{mark}{name}", f"{shown}. {text(value) if callable(text) else text}"
    yield (
        "weights",
        (
            "An item counts the same, however a step is split: sum(weight x gradient) / "
            "sum(weight) over all processes and micro-batches. The weight is the number of "
            "samples; for models of transformers, class weights and ignored labels, that of the "
            "labels that count; or what `StepOutput` says. [6]"
        ),
    )
    yield (
        "order of data",
        (
            "By seed and epoch alone; the number of processes and workers changes who computes a "
            "sample, not its step. No sample is repeated to fill up; `drop_last` is honoured. "
            "[14, 16]"
        ),
    )
    yield "schedule", "Advances once for each update, never for a skipped step. [10]"
    yield "not finite", _not_finite(trainer)
    yield "evaluation", "In evaluation mode; means weighted by samples; changes no state. [19-21]"
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    normalised = model is not None and any(isinstance(m, kinds) for m in model.modules())
    if normalised and trainer.processes.num_processes > 1:
        yield "batch statistics", "Of each process's own samples; process 0's are kept. [6]"
    yield (
        "matmul",
        f"torch's `float32_matmul_precision` is {torch.get_float32_matmul_precision()!r}.",
    )
    yield (
        "",
        "Numbers in brackets are rules in docs/design.md; all settings stand in each checkpoint.",
    )


_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}
_MEANINGS: dict[str, Any] = {
    "seed": "Order, augmentation, dropout follow from it; first weights are as you made them. [12]",
    "deterministic": lambda on: (
        "torch's deterministic algorithms." if on else "On a GPU two runs may differ a little. [30]"
    ),
    "gradient_accumulation_steps": "Micro-batches of a process for each update. [1]",
    "max_grad_norm": lambda limit: _clipping(limit, "norm"),
    "max_grad_value": lambda limit: _clipping(limit, "elements"),
    "drop_last_window": lambda drops: (
        f"The smaller last step of an epoch is {'dropped' if drops else 'applied'}. [7]"
    ),
    "split_batches": lambda splits: (
        f"The loader's batch size is that of {'all processes' if splits else 'one process'}. [14]"
    ),
    "sample_seeding": lambda seeds: (
        "Augmentation of a sample is the same with any workers, after a resume and on other "
        "numbers of processes; of what `__getitems__` fetches, where batches are cut alike. [13]"
        if seeds
        else "Augmentation depends on workers, and differs after a resume. [13]"
    ),
    "max_consecutive_skips": "Skipped steps in a row after which the run gives up. [2]",
    "log_every_n_steps": "Logged figures are weighted means over so many steps. [35]",
}


def _clipping(limit: float | None, what: str) -> str:
    if limit is None:
        return f"The gradient's {what} are not clipped. [8]".replace("norm are", "norm is")
    return f"The {what} of the normalised, unscaled, global gradient. [8]"


def _not_finite(trainer: Explained) -> str:
    if any(type(callback).__name__ == "NaNGuard" for callback in trainer.callbacks.callbacks):
        return "`NaNGuard` decides what becomes of a loss or gradient that is not finite. [11]"
    if trainer.precision.name == "fp16":
        return "An overflow skips the step; what else is NaN trains on without `NaNGuard`. [9, 11]"
    return "Nobody looks: a NaN trains on, and is shown as NaN. `NaNGuard()` stops there. [11]"
