"""The losses: as a user gives them, and as a mean with its weight, for the loop by hand."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.right_programs.models import CLASSES
from tests.right_programs.program import LOSSES, Program

__all__ = ["IGNORED", "loss_fn", "mean_loss", "weight_of"]

IGNORED = 2  # a class


def main_loss(outputs: Any, targets: Tensor) -> Tensor:
    """A function of one's own, also of several outputs."""
    scores = outputs["main"] if isinstance(outputs, dict) else outputs
    loss = functional.cross_entropy(scores, targets)
    return loss + 0.1 * outputs["other"].pow(2).mean() if _has_other(outputs) else loss


class Squares(nn.Module):
    """A module of one's own, with a tensor."""

    eye: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("eye", torch.eye(CLASSES))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = (outputs - self.eye[targets]).pow(2).mean()
        return loss


def loss_fn(program: Program, model: nn.Module) -> Any:
    """Return what `fit` is given; None where the step or the model computes the loss."""
    if program.loss not in LOSSES:
        return None
    if program.loss == "learned":
        return model.loss_fn
    known: dict[str, Any] = {
        "cross entropy": nn.CrossEntropyLoss(),
        "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
        "class weights": nn.CrossEntropyLoss(weight=_class_weights(program)),
        "ignored class": nn.CrossEntropyLoss(ignore_index=IGNORED),
        "partial": partial(functional.cross_entropy, label_smoothing=0.05),
        "function": main_loss,
        "module": Squares(),
        "margin": nn.MultiMarginLoss(margin=0.5),
        "yes or no": nn.BCEWithLogitsLoss(),
    }
    return known[program.loss]


def _class_weights(program: Program) -> Tensor:
    return torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64 if program.double else None)


def weight_of(program: Program, batch: Any) -> float:
    """Return what the mean over a batch counts."""
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    counted = labels != -100
    if program.loss == "class weights":
        return float(_class_weights(program)[labels].sum())
    if program.loss == "ignored class":
        return float((labels != IGNORED).sum())
    if program.loss == "step by weight":
        return float(counted.sum())
    if program.loss == "step by number":
        return float((1.0 + labels[counted]).sum())
    return len(labels)


def mean_loss(program: Program, model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """Return scores, and a mean over a batch."""
    if program.loss == "the model's own":
        outputs = model(**batch)
        return outputs["logits"], outputs["loss"]
    inputs, labels = batch.values() if isinstance(batch, dict) else batch
    outputs = model(inputs)
    scores = outputs["main"] if isinstance(outputs, dict) else outputs
    if program.loss in LOSSES:
        return scores, loss_fn(program, model)(outputs, labels)
    counted = labels != -100
    items = functional.cross_entropy(scores[counted], labels[counted], reduction="none")
    if _has_other(outputs):
        items = items + 0.1 * outputs["other"].pow(2).mean(-1)[counted]
    if program.loss == "step by number":
        weights = 1.0 + labels[counted]
        return scores, (items * weights).sum() / weights.sum()
    return scores, items.mean()


def _has_other(outputs: Any) -> bool:
    return isinstance(outputs, dict) and "other" in outputs
