"""torchtnt: an AutoUnit, trained with `train`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchtnt.framework import AutoUnit, EvalUnit, State, evaluate, train
from typing_extensions import override

from benchmarks.compare.evaluation import Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.training import LOG_EVERY, Parts, Training
from benchmarks.compare.workload import Unsupported

PACKAGE = "torchtnt"


class Unit(AutoUnit[Any]):
    """The model with its loss and its optimizer."""

    def __init__(self, task: Training, parts: Parts) -> None:
        super().__init__(
            module=parts.model,
            device=torch.device("cpu"),
            strategy="ddp" if task.processes > 1 else None,
            precision="bf16" if task.bf16 else None,
            gradient_accumulation_steps=task.accumulation,
            clip_grad_norm=task.max_norm,
        )
        self._parts = parts
        self._writer = None
        if task.extras:
            from torchtnt.utils.loggers import TensorBoardLogger

            self._writer = TensorBoardLogger(str(parts.folder / "tensorboard"))

    @override
    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> Any:
        return self._parts.make_optimizer(module.parameters()), None

    @override
    def compute_loss(self, state: State, data: Any) -> tuple[torch.Tensor, Any]:
        return self._parts.loss(self.module, data), None

    @override
    def on_train_step_end(self, state: State, data: Any, step: int, results: Any) -> None:
        if self._writer is not None and (step + 1) % LOG_EVERY == 0:
            self._writer.log("train/loss", results.loss.item(), step + 1)


def training(task: Training, parts: Parts) -> None:
    """Train with `train`."""
    loader = parts.loader
    if task.processes > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        sampler: Any = DistributedSampler(parts.dataset, shuffle=False)
        loader = DataLoader(parts.dataset, batch_size=task.batch_size, sampler=sampler)
    callbacks = []
    if task.extras:
        from torchtnt.framework.callbacks import DistributedCheckpointSaver, TQDMProgressBar

        folder = str(parts.folder / "checkpoints")
        saver = DistributedCheckpointSaver(folder, save_every_n_epochs=1, async_checkpoint=False)
        callbacks = [TQDMProgressBar(), saver]
    train(Unit(task, parts), loader, max_epochs=task.epochs, callbacks=callbacks)


class Evaluator(EvalUnit[Any]):
    """Counts what is right."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.accuracy = 0.0

    @override
    def on_eval_start(self, state: State) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64)

    @override
    def eval_step(self, state: State, data: Any) -> None:
        inputs, targets = data
        right = (self.model(inputs).argmax(-1) == targets).sum()
        self.counts += torch.stack([right, torch.tensor(len(targets))])

    @override
    def on_eval_end(self, state: State) -> None:
        dist.all_reduce(self.counts)
        right, total = self.counts.tolist()
        self.accuracy = right / total


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with `evaluate`; the metric is one's own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    sampler: Any = DistributedSampler(parts.dataset, shuffle=False)
    loader = DataLoader(parts.dataset, batch_size=task.batch_size, sampler=sampler)
    unit = Evaluator(parts.model)

    def run() -> float:
        evaluate(unit, loader)
        return unit.accuracy

    return run


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Not by itself."""
    raise Unsupported("saves and loads only inside train")


loading = saving
