"""pytorch-accelerated: `Trainer` and `SaveTrainingStateCallback`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from pytorch_accelerated.callbacks import SaveTrainingStateCallback, TrainerCallback
from pytorch_accelerated.trainer import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.behaviour import scored, toys
from benchmarks.behaviour.job import (
    NO_CHECK,
    TORCH_GATHER,
    Framework,
    Job,
    Variant,
    by_number,
    option,
)


class _Trainer(Trainer):
    job: Job

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Any = None) -> Any:
        if self.job.sampler is not None and self.job.batches:
            batches = self.job.sampler(self.train_dataset)
            return DataLoader(self.train_dataset, batch_sampler=batches)
        return super().create_train_dataloader(batch_size, train_dl_kwargs)

    def _create_accelerator(self) -> Accelerator:
        accelerator = super()._create_accelerator()
        if self.job.overflow:
            accelerator.scaler = torch.amp.GradScaler("cpu")  # made on GPUs by itself
        return accelerator

    def calculate_train_batch_loss(self, batch: Any) -> Any:
        outputs = super().calculate_train_batch_loss(batch)
        if "num_items_in_batch" in self.job.options:
            assert self.job.weigh is not None
            outputs["num_items_in_batch"] = self.job.weigh(batch[1])
        return outputs


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.losses += trainer.run_history.get_metric_values("train_loss_epoch")


class _Gathering(TrainerCallback):
    """Gathers as in its guide to metrics."""

    def __init__(self, outputs: Callable[[Tensor], Any]) -> None:
        self.outputs, self.found = outputs, []

    def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.found.append(trainer.gather(self.outputs(batch[0]), padding_value=0.0))


class _Metric(TrainerCallback):
    """Computes a metric as in its guide to metrics."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    def on_eval_step_end(self, trainer: Any, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        self.metric.update(batch_output["model_outputs"], batch[1])

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.run_history.update_metric("metric", self.metric.compute())


class PytorchAccelerated(Framework):
    """A loss is known for each epoch, which is where it is looked at."""

    package = "pytorch-accelerated"
    variants: ClassVar = {
        "contrastive": [TORCH_GATHER],
        "overflow": [Variant("AdamW(fused=False)", {"optimizer": toys.Unfused})],
        "tokens_accumulation": [option("num_items_in_batch", num_items_in_batch=True)],
        "tokens_processes": [option("num_items_in_batch", num_items_in_batch=True)],
    }
    left_to_users: ClassVar = {
        "replica": NO_CHECK,
        "rates_differ": NO_CHECK,
    }
    not_offered: ClassVar = {
        "eval_figure": "callbacks get what the step returns, and average by themselves",
        "sigterm": "it does not handle signals",
        "background": "saves are in the foreground",
        "gather_texts": "it gathers tensors",
        "gather_ragged": "it pads the first dimension only",
        "iterable": "data sets must have a length",
        "kill_three": "the user chooses the checkpoint",
        "torn": "the user chooses the checkpoint",
    }

    def _trainer(self, job: Job, *callbacks: Any) -> _Trainer:
        model = job.model(job.samples)
        kind = type("_Trainer", (_Trainer,), {"job": job})
        saving = []
        if job.save_every is not None:
            saving = [
                SaveTrainingStateCallback(
                    str(job.folder),
                    save_every_n_steps=job.save_every,
                    max_checkpoints=job.keep,
                    save_at_end=False,
                )
            ]
        return kind(  # type: ignore[no-any-return]
            model, job.loss, job.optimizer(model.parameters()), callbacks=[*saving, *callbacks]
        )

    def train(self, job: Job) -> None:
        self._run(self._trainer(job), job)

    def _run(self, trainer: _Trainer, job: Job) -> None:
        data = job.data(job.samples)
        loading: dict[str, Any] = {"num_workers": job.workers, "shuffle": job.shuffle}
        if job.sampler is not None and not job.batches:
            loading["sampler"] = job.sampler(data)
        trainer.train(
            data,
            num_epochs=job.epochs,
            per_device_batch_size=job.batch,
            gradient_accumulation_steps=job.accumulation,
            create_scheduler_fn=job.scheduler if job.has_scheduler else None,
            collate_fn=job.collate,
            train_dataloader_kwargs=loading,
            resume_from=None if job.resume is None else str(job.resume),
        )

    def _evaluate(self, trainer: _Trainer, job: Job) -> None:
        data = job.data(job.samples)
        trainer.evaluate(data, job.batch, dataloader_kwargs={"num_workers": job.workers})

    def evaluate(self, job: Job) -> float:
        trainer = self._trainer(job)
        self._evaluate(trainer, job)
        return float(trainer.run_history.get_latest_metric("evaluation_loss"))

    def metric(self, job: Job) -> float:
        trainer = self._trainer(job, _Metric(scored.metric(job.metric)))
        self._evaluate(trainer, job)
        return float(trainer.run_history.get_latest_metric("metric"))

    def contrast(self, job: Job) -> None:
        trainer = self._trainer(job)
        gather = trainer.gather
        trainer.loss_func = job.contrastive(gather)
        self._run(trainer, job)

    def logged(self, job: Job) -> list[float]:
        losses = _Losses()
        self._run(self._trainer(job, losses), job)
        return losses.losses

    def gather(self, job: Job, outputs: Callable[[Tensor], Any]) -> list[Any]:
        gathering = _Gathering(outputs)
        self._evaluate(self._trainer(job, gathering), job)
        return gathering.found

    def skips(self, job: Job) -> int | None:
        trainer = self._trainer(job)
        self._run(trainer, job)
        return int(trainer.scheduler.last_epoch)

    def checkpoints(self, folder: Path) -> list[Path]:
        return by_number(folder.glob("step_*"))


FRAMEWORK = PytorchAccelerated()
