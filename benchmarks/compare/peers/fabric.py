"""Lightning Fabric: a loop of one's own, with `setup` and `backward`."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric import Fabric
from tqdm import tqdm

from benchmarks.compare.evaluation import CLASSES, Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.training import LOG_EVERY, Parts, Training

PACKAGE = "lightning"


def training(task: Training, parts: Parts) -> None:
    """Train with an own loop."""
    fabric = Fabric(
        accelerator="cpu",
        devices=task.processes,
        strategy="ddp" if task.processes > 1 else "auto",
        precision="bf16-mixed" if task.bf16 else "32-true",
        loggers=_logger(parts) if task.extras else None,
    )
    fabric.launch()
    model, optimizer = fabric.setup(parts.model, parts.make_optimizer(parts.model.parameters()))
    loader = fabric.setup_dataloaders(parts.loader)
    bar = tqdm(total=task.steps * task.epochs, disable=not task.extras or not fabric.is_global_zero)
    step = 0
    model.train()
    for epoch in range(task.epochs):
        for number, batch in enumerate(loader, start=1):
            if task.accumulation == 1:
                loss = parts.loss(model, batch)
                fabric.backward(loss)
            else:
                accumulates = number % task.accumulation != 0
                with fabric.no_backward_sync(model, enabled=accumulates):
                    loss = parts.loss(model, batch) / task.accumulation
                    fabric.backward(loss)
                if accumulates:
                    continue
            if task.max_norm is not None:
                fabric.clip_gradients(model, optimizer, max_norm=task.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if task.extras:
                step += 1
                bar.update()
                if step % LOG_EVERY == 0:
                    value = loss.item()
                    bar.set_postfix(loss=value, refresh=False)
                    fabric.log("train/loss", value, step=step)
        if task.extras:
            state = {"model": model, "optimizer": optimizer, "step": step}
            fabric.save(parts.folder / f"epoch-{epoch}.ckpt", state)
    bar.close()
    if task.extras:
        fabric.logger.finalize("success")


def _logger(parts: Parts) -> Any:
    from lightning.fabric.loggers import TensorBoardLogger

    return TensorBoardLogger(parts.folder)


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with a metric of torchmetrics, which adds up over the processes at the end."""
    from torchmetrics.classification import MulticlassAccuracy

    model, loader, _ = _prepared(task, parts)
    metric = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    def evaluate() -> float:
        metric.reset()
        with torch.no_grad():
            for inputs, targets in loader:
                metric.update(model(inputs), targets)
        return float(metric.compute())

    return evaluate


def gathering(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with `all_gather` of every batch."""
    model, loader, fabric = _prepared(task, parts)

    def evaluate() -> float:
        right = total = 0
        with torch.no_grad():
            for inputs, targets in loader:
                both = (model(inputs).argmax(-1), targets)
                predictions, references = fabric.all_gather(both)
                right += (predictions == references).sum()
                total += references.numel()
        return int(right) / total

    return evaluate


def _prepared(task: Evaluation, parts: EvaluationParts) -> tuple[Any, Any, Fabric]:
    fabric = Fabric(accelerator="cpu", devices=task.processes, strategy="ddp")
    fabric.launch()
    model, loader = fabric.setup(parts.model), fabric.setup_dataloaders(parts.loader)
    return model.eval(), loader, fabric


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Save with `Fabric.save`."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    state = {"model": model, "optimizer": optimizer}
    return lambda: fabric.save(parts.folder / "state.ckpt", state)


def loading(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Load with `Fabric.load`."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    state = {"model": model, "optimizer": optimizer}
    return lambda: fabric.load(parts.folder / "state.ckpt", state)
