"""Lightning's Trainer; in its barebones mode where nothing optional is wanted."""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from benchmarks.compare.evaluation import CLASSES, Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.training import LOG_EVERY, Parts, Training
from benchmarks.compare.workload import Unsupported

PACKAGE = "lightning"

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Module(L.LightningModule):
    """The model with its step."""

    def __init__(self, parts: Parts, logs: bool) -> None:
        super().__init__()
        self.model = parts.model
        self._parts = parts
        self._logs = logs

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._parts.loss(self.model, batch)
        if self._logs:
            self.log("train/loss", loss, prog_bar=True)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return self._parts.make_optimizer(self.parameters())


def training(task: Training, parts: Parts) -> None:
    """Train with `Trainer.fit`; on two processes with a sampler that keeps the order.

    The one that Lightning would put in shuffles, whatever the loader did.
    """
    loader = parts.loader
    if task.processes > 1:
        sampler: Any = DistributedSampler(
            parts.dataset, task.processes, int(os.environ["RANK"]), shuffle=False
        )
        loader = DataLoader(parts.dataset, batch_size=task.batch_size, sampler=sampler)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=task.processes,
        strategy="ddp" if task.processes > 1 else "auto",
        max_epochs=task.epochs,
        precision="bf16-mixed" if task.bf16 else "32-true",
        accumulate_grad_batches=task.accumulation,
        gradient_clip_val=task.max_norm,
        default_root_dir=parts.folder,
        use_distributed_sampler=False,
        **(_extras(parts) if task.extras else {"barebones": True}),
    )
    trainer.fit(Module(parts, task.extras), loader)


def _extras(parts: Parts) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
    from lightning.pytorch.loggers import TensorBoardLogger

    return {
        "logger": TensorBoardLogger(parts.folder),
        "log_every_n_steps": LOG_EVERY,
        "callbacks": [TQDMProgressBar(), ModelCheckpoint(every_n_epochs=1)],
        "enable_model_summary": False,
    }


class Evaluated(L.LightningModule):
    """The model with a metric of torchmetrics."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.accuracy.update(self.model(inputs), targets)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with `Trainer.validate`."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=task.processes,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Evaluated(parts.model)

    def evaluate() -> float:
        (figures,) = trainer.validate(module, parts.loader, verbose=False)
        return figures["accuracy"]

    return evaluate


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Not by itself."""
    raise Unsupported("saves and loads only inside fit")


loading = saving
