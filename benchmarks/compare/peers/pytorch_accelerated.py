"""The Trainer of pytorch-accelerated."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from pytorch_accelerated import Trainer as Base
from pytorch_accelerated.callbacks import TrainerCallback
from typing_extensions import override

from benchmarks.compare.evaluation import CLASSES, Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.training import LOG_EVERY, Parts, Training

PACKAGE = "pytorch-accelerated"


class Trainer(Base):
    """With what the settings of `train` do not cover, by the methods that are there for it."""

    def __init__(self, task: Training, parts: Parts, callbacks: tuple[Any, ...]) -> None:
        self._task, self._parts = task, parts
        optimizer = parts.make_optimizer(parts.model.parameters())
        super().__init__(parts.model, parts.loss_fn, optimizer, callbacks=callbacks)

    @override
    def _create_accelerator(self) -> Accelerator:
        return Accelerator(cpu=True, mixed_precision="bf16" if self._task.bf16 else "no")

    @override
    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        if self._parts.loss_fn is not None:
            return super().calculate_train_batch_loss(batch)
        outputs = self.model(**batch)
        return {
            "loss": outputs.loss,
            "model_outputs": outputs,
            "batch_size": len(batch["input_ids"]),
        }

    @override
    def optimizer_step(self) -> None:
        if self._task.max_norm is not None:
            self._accelerator.clip_grad_norm_(self.model.parameters(), self._task.max_norm)
        super().optimizer_step()


def training(task: Training, parts: Parts) -> None:
    """Train with `Trainer.train`."""
    loading = {"shuffle": False, "num_workers": task.workers, "pin_memory": False}
    Trainer(task, parts, _extras(task, parts) if task.extras else ()).train(
        train_dataset=parts.dataset,
        num_epochs=task.epochs,
        per_device_batch_size=task.batch_size,
        gradient_accumulation_steps=task.accumulation,
        train_dataloader_kwargs=loading | {"persistent_workers": task.workers > 0},
    )


def _extras(task: Training, parts: Parts) -> tuple[Any, ...]:
    from pytorch_accelerated.callbacks import ProgressBarCallback, SaveTrainingStateCallback
    from torch.utils.tensorboard import SummaryWriter

    class TensorBoard(TrainerCallback):
        """The project brings no TensorBoard callback; its guide says to write one."""

        def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
            self.writer, self.step = SummaryWriter(str(parts.folder / "tensorboard")), 0

        def on_train_step_end(self, trainer: Any, batch_output: Any, **kwargs: Any) -> None:
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self.writer.add_scalar("train/loss", batch_output["loss"].item(), self.step)

        def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
            self.writer.close()

    saving = SaveTrainingStateCallback(
        str(parts.folder / "checkpoints"), save_every_n_epochs=1, save_at_end=False
    )
    return (ProgressBarCallback, TensorBoard(), saving)


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with `Trainer.evaluate` and a metric of torchmetrics, as the guide shows it."""
    from torchmetrics.classification import MulticlassAccuracy

    metric = MulticlassAccuracy(CLASSES, average="micro", validate_args=False)

    class Accuracy(TrainerCallback):
        """Feeds the metric."""

        def on_eval_step_end(
            self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any
        ) -> None:
            metric.update(batch_output["model_outputs"], batch[1])

    class Evaluator(Base):
        """On the CPU."""

        @override
        def _create_accelerator(self) -> Accelerator:
            return Accelerator(cpu=True)

    loss_fn = torch.nn.CrossEntropyLoss()
    trainer = Evaluator(parts.model, loss_fn, None, callbacks=(Accuracy,))
    options = {"num_workers": 0, "pin_memory": False}

    def evaluate() -> float:
        metric.reset()
        trainer.evaluate(
            dataset=parts.dataset,
            per_device_batch_size=task.batch_size,
            dataloader_kwargs=options,
        )
        return float(metric.compute())

    return evaluate


class _Saving(Base):
    """On the CPU, with what `train` makes."""

    @override
    def _create_accelerator(self) -> Accelerator:
        return Accelerator(cpu=True)


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Save with `Trainer.save_checkpoint`."""
    trainer = _Saving(parts.model, None, parts.optimizer, callbacks=())
    return lambda: trainer.save_checkpoint(str(parts.folder / "state.pt"))


def loading(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Load with `Trainer.load_checkpoint`."""
    trainer = _Saving(parts.model, None, parts.optimizer, callbacks=())
    return lambda: trainer.load_checkpoint(str(parts.folder / "state.pt"))
