"""Whether the loss that a model computes itself is the mean that its weight says."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.basics import rng
from trainkit.containers.tree import count_samples, parts
from trainkit.data import MicroBatch, Window
from trainkit.training.default_steps import is_default, item_count
from trainkit.training.modes import in_evaluation_mode
from trainkit.training.run import Run
from trainkit.training.unchanged import kept
from trainkit.types import class_name

_MOST_ROWS = 8
_MOST_NAMES = 3


def check_loss(run: Run, window: Window) -> None:
    """Let it be said, before a window is trained on, where a loss is another mean (rule 6).

    Asked is the default step of a model with a loss of its own, about the first micro-batch of at
    least two samples. A sharded model is not asked, nor one that sees pieces of sequences.
    """
    is_its_own = is_default(run.training_step) and run.evaluation.evaluator.loss_fn is None
    if is_its_own and not run.strategy.sharded and run.strategy.context is None:
        window.through(partial(_seen, run))


def _seen(run: Run, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    is_due = True
    for micro_batch in micro_batches:
        if is_due and (count := min(micro_batch.counts)) > 1:  # alike on all processes
            is_due = False
            data = micro_batch.data
            for batch in data.values() if run.train_loader.parts else [data]:
                # Batches may be of another kind; errors of a model are for the step to raise.
                with suppress(Exception):
                    if others := _not_by_weight(run, batch, min(count, _MOST_ROWS)):
                        run.print(_sentence(run.module, others))
        yield micro_batch


def _not_by_weight(run: Run, batch: Mapping[str, Any], count: int) -> list[str]:
    """Return the outputs of which a sample has not the gradient that it has by its weight.

    In a mean over several samples it is that of the sample alone, times its share of the weight.
    This needs no backward through the model, and unlike the losses, which are all much the same at
    first, it tells 5 % from rounding.
    """
    module = run.module
    rows = sorted(range(count), key=lambda row: -_weight(module, batch, [row]))
    first = rows[:1]  # the heaviest: the lightest may have nothing that counts
    share = _weight(module, batch, first) / _weight(module, batch, rows)
    with (
        rng.preserved(run.strategy.device),
        kept(module),
        in_evaluation_mode(module),
        run.precision.autocast(),
    ):
        alone, again, together = (_gradients(module, batch, r) for r in (first, first, rows))
    largest = max(gradient.norm() for _, gradient in alone.values())
    # Experts are balanced over all samples together, too little to be seen in other gradients.
    others = ["`aux_loss`"] if "aux_loss" in alone else []
    for name, (output, gradient) in alone.items():
        outputs, gradients = together.get(name, (output, gradient))
        if not output.dim() or outputs.shape != (count * len(output), *output.shape[1:]):
            continue  # not one for each sample
        own, expected = gradients[: len(output)].double(), gradient.double() * share
        noise = max(
            _apart(outputs[: len(output)], output),
            _apart(again[name][0], output),  # models that draw, also for evaluation
            _apart(again[name][1], gradient),
        )
        apart = _apart(own, expected)
        rounding = 16 * torch.finfo(gradient.dtype).eps
        is_seen = max(own.norm(), expected.norm()) > 1e-6 * largest
        if is_seen and noise < 0.01 and apart > max(1e-3, rounding, 20 * noise):
            others.append(f"`{name}` ({apart:.2g} apart)")
    return others


def _gradients(
    module: nn.Module, batch: Mapping[str, Any], rows: list[int]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each output that the loss was computed from, and its gradient."""
    outputs = module.forward(**_cut(batch, rows))  # not what was compiled for other sizes
    tensors = {
        name: tensor
        for name, tensor in _tensors(outputs)
        if name != "loss" and tensor.requires_grad and tensor.dtype != torch.float16  # underflows
    }
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        outputs["loss"].sum(), [*tensors.values()], allow_unused=True
    )
    return {
        name: (tensor.detach(), gradient)
        for (name, tensor), gradient in zip(tensors.items(), gradients, strict=True)
        if gradient is not None
    }


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in zip(*parts(tree), strict=True):
        if isinstance(value, Tensor):
            yield f"{path}{key}", value
        else:
            yield from _tensors(value, f"{path}{key}.")


def _apart(one: Tensor, other: Tensor) -> float:
    """Return how far apart two tensors are: 0 if equal, 1 if one is zero."""
    one, other = one.double(), other.double()
    return float((one - other).norm() / max(one.norm(), other.norm()).clamp_min(1e-300))


def _weight(module: nn.Module, batch: Mapping[str, Any], rows: list[int]) -> float:
    weight = item_count(module, _cut(batch, rows))
    return float(len(rows) if weight is None else weight)


def _cut(batch: Mapping[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return some samples of a batch of keyword arguments; raise where it holds anything else."""
    size = count_samples(batch)

    def cut(value: Any) -> Any:
        if not isinstance(value, list | tuple | Tensor) or getattr(value, "ndim", 1) == 0:
            return value
        if len(value) != size:
            raise ValueError(f"{len(value)} rows for {size} samples")
        return value[rows] if isinstance(value, Tensor) else [value[row] for row in rows]

    return {name: cut(value) for name, value in batch.items()}


def _sentence(module: nn.Module, others: list[str]) -> str:
    return (
        f"trainkit: the loss of `{class_name(module)}` is not one mean over what its weight "
        f"counts. The gradients of {', '.join(others[:_MOST_NAMES])} for a sample are not those "
        "that it has by its weight, so they and `eval/loss` depend on which samples share a "
        "micro-batch. If that is not meant, override `training_step` and return each mean with the "
        'number of items that it is over, as "Losses of several means" in '
        "docs/migrate/transformers.md shows; nothing is said of such a step."
    )
