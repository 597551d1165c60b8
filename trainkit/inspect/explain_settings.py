"""Every setting that decides the numbers of a run, and the rule behind it, in words."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from trainkit.config import TrainConfig
from trainkit.precision import Precision
from trainkit.training.callback import CallbackList

__all__ = ["describe_settings"]


def describe_settings(
    config: TrainConfig,
    callbacks: CallbackList,
    precision: Precision,
    processes: int,
    model: nn.Module | None,
) -> Iterator[tuple[str, str]]:
    """Yield every setting that changes numbers, and the rule behind it."""
    yield from _of_config(config)
    yield from _ALWAYS.items()
    yield "not finite", _not_finite(callbacks, precision)
    if processes > 1 and model is not None and _normalises(model):
        yield "batch statistics", "Of each process's own samples; process 0's are kept (rule 6)."
    matmul = torch.get_float32_matmul_precision()
    yield "matmul", f"torch's `float32_matmul_precision` is {matmul!r}."
    yield "", "The rules stand in docs/design.md; all settings stand in each checkpoint."


_ALWAYS = {
    "weights": "An item counts the same, however a step is split: sum(weight x gradient) / "
    "sum(weight) over all processes and micro-batches. The weight is the number of samples; for "
    "models of transformers, class weights and ignored labels, that of the labels that count; or "
    "what `StepOutput` says (rule 6).",
    "order of data": "By seed and epoch alone; the number of processes and workers changes who "
    "computes a sample, not its step. No sample is repeated to fill up; `drop_last` is honoured. "
    "(rules 14 and 16)",
    "schedule": "Advances once for each update, never for a skipped step (rule 10).",
    "evaluation": "In evaluation mode; means weighted by samples; changes no state (rules 19 to "
    "21).",
}
"""What no setting changes."""


def _of_config(config: TrainConfig) -> Iterator[tuple[str, str]]:
    for name, text in _MEANINGS.items():
        value = getattr(config, name)
        mark = "" if value == _DEFAULTS[name] else "* "
        shown = f"{value:g}" if isinstance(value, float) else value
        yield f"{mark}{name}", f"{shown}. {text(value) if callable(text) else text}"


_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}
_MEANINGS: dict[str, Any] = {
    "seed": "Order, augmentation, dropout follow from it, first weights do not (rule 12).",
    "deterministic": lambda on: (
        "torch's deterministic algorithms." if on else "Two GPU runs may differ a little (rule 30)."
    ),
    "gradient_accumulation_steps": "Micro-batches of a process for each update (rule 1).",
    "max_grad_norm": lambda limit: _clipping(limit, "norm"),
    "max_grad_value": lambda limit: _clipping(limit, "elements"),
    "drop_last_window": lambda drops: (
        f"The smaller last step of an epoch is {'dropped' if drops else 'applied'} (rule 7)."
    ),
    "split_batches": lambda splits: (
        f"The loader's batch size is that of {'all processes' if splits else 'one'} (rule 14)."
    ),
    "sample_seeding": lambda seeds: (
        "Augmentation of a sample is the same with any workers, after a resume and on other "
        "numbers of processes; of what `__getitems__` fetches, where batches are cut alike "
        "(rule 13)."
        if seeds
        else "Augmentation depends on workers, and differs after a resume (rule 13)."
    ),
    "gradient_checkpointing": "Computes activations again in backward; gradients are the same.",
    "limit_train_batches": "Micro-batches of a process that are used of an epoch (rule 14).",
    "limit_eval_batches": "Batches of a process that an evaluation of `fit` is made of (rule 19).",
    "overfit_batches": "Both limits; then every epoch has the batches of the first (rule 14).",
    "dry_run": "A number: the run ends after so many steps, and nothing is kept.",
    "max_consecutive_skips": "Skipped steps in a row after which the run gives up (rule 2).",
    "log_every_n_steps": "Logged values are weighted means over so many steps (rule 35).",
}


def _clipping(limit: float | None, what: str) -> str:
    if limit is None:
        return f"The gradient's {what} are not clipped (rule 8).".replace("norm are", "norm is")
    return f"The {what} of the normalised, unscaled, global gradient (rule 8)."


def _normalises(model: nn.Module) -> bool:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return any(isinstance(module, kinds) for module in model.modules())


def _not_finite(callbacks: CallbackList, precision: Precision) -> str:
    if any(type(callback).__name__ == "NaNGuard" for callback in callbacks.callbacks):
        return "`NaNGuard` decides what becomes of a loss or gradient that is not finite (rule 11)."
    if precision.name == "fp16":
        return "An overflow skips the step; other NaN train on without `NaNGuard` (rules 9 and 11)."
    return "Nobody looks: a NaN trains on, and is shown as NaN. `NaNGuard()` stops there (rule 11)."
