"""transformers: `Trainer` with `TrainingArguments`."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from transformers import Trainer, TrainingArguments

from benchmarks.behaviour import scored, toys
from benchmarks.behaviour.job import (
    NO_CHECK,
    TORCH_GATHER,
    Framework,
    Job,
    Variant,
    by_number,
    option,
    size_of_world,
)

transformers.logging.set_verbosity_error()

ARGUMENTS = ("enable_jit_checkpoint", "logging_nan_inf_filter", "eval_use_gather_object")


class _Model(nn.Module):
    """A model as transformers has them: it computes its own loss."""

    def __init__(self, job: Job, outputs: Any = None) -> None:
        super().__init__()
        self.job, self.model, self.outputs = job, job.model(job.samples), outputs

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        outputs = self.model(x)
        if labels is None:
            return {"logits": outputs}
        loss = self.job.loss(outputs, labels)
        return {"loss": loss, "logits": self.outputs(x) if self.outputs else outputs}


class _WithKwargs(_Model):
    """Takes what its callers may pass, as many models do."""

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        return super().forward(x, labels)


class _Trainer(Trainer):
    """Has the samplers of the job where it has some."""

    job: Job

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.job.sampler is not None and not self.job.batches:
            return self.job.sampler(self.train_dataset)
        return super()._get_train_sampler(train_dataset)

    def get_train_dataloader(self) -> DataLoader[Any]:
        if self.job.sampler is None or not self.job.batches:
            return super().get_train_dataloader()
        batches = self.job.sampler(self.train_dataset)
        loader = DataLoader(
            self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)  # type: ignore[no-any-return]


def _collate(job: Job, items: list[Any]) -> dict[str, Any]:
    return dict(zip(("x", "labels"), (job.collate or default_collate)(items), strict=True))


class Transformers(Framework):
    """Token counts by `compute_loss_func`, as documented for losses of one's own."""

    package = "transformers"
    variants: ClassVar = {
        "contrastive": [TORCH_GATHER],
        "overflow": [Variant("AdamW(fused=False)", {"optimizer": toys.Unfused})],
        "rank_augmentation": [Variant("dataloader_num_workers=1", {"workers": 1})],
        "nan": [option(logging_nan_inf_filter=False)],
        "sigterm": [option(enable_jit_checkpoint=True)],
        "iterable": [
            Variant("a data set that splits itself over workers", {"data": toys.SplitStream})
        ],
        "sum_loss": [option("a forward that takes **kwargs", with_kwargs=True)],
        "kwargs": [option("model.accepts_loss_kwargs = False", accepts_loss_kwargs=False)],
    }
    left_to_users: ClassVar = {
        "replica": NO_CHECK,
        "rates_differ": NO_CHECK,
    }
    not_offered: ClassVar = {
        "eval_figure": "figures come from `compute_metrics`, over all outputs",
        "background": "saves are in the foreground",
        "gather_texts": "predictions are arrays",
        "break_early": "evaluations cannot be left early",
    }

    def _trainer(self, job: Job, outputs: Any = None) -> _Trainer:
        saving = {"save_strategy": "no"}
        if job.save_every is not None:
            saving = {"save_strategy": "steps", "save_steps": job.save_every}
        arguments = TrainingArguments(
            output_dir=str(job.folder or tempfile.mkdtemp()),
            per_device_train_batch_size=job.batch,
            per_device_eval_batch_size=job.batch,
            num_train_epochs=job.epochs,
            gradient_accumulation_steps=job.accumulation,
            train_sampling_strategy="random" if job.shuffle else "sequential",
            dataloader_num_workers=job.workers,
            save_total_limit=job.keep,
            logging_steps=1,
            logging_strategy="steps",
            max_grad_norm=0.0,
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            label_names=["labels"],
            report_to=[],
            **saving,
            **{name: job.options[name] for name in ARGUMENTS if name in job.options},
        )
        data = job.data(job.samples)
        if isinstance(data, IterableDataset):  # whose end it cannot know
            arguments.max_steps = job.samples // (job.batch * size_of_world())
        model = (_WithKwargs if "with_kwargs" in job.options else _Model)(job, outputs)
        if "accepts_loss_kwargs" in job.options:
            model.accepts_loss_kwargs = False  # type: ignore[assignment]
        optimizer = job.optimizer(model.parameters())
        flat = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer_class = type("_Trainer", (_Trainer,), {"job": job})
        return trainer_class(  # type: ignore[no-any-return]
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=job.data(job.samples),
            data_collator=partial(_collate, job),
            optimizers=(optimizer, job.scheduler(optimizer) or flat),
            compute_loss_func=_of_tokens(job) if job.weigh is not None else None,
            compute_metrics=_metric(job),
        )

    def train(self, job: Job) -> None:
        resume = {"auto": True, None: None}.get(job.resume, str(job.resume))  # type: ignore[call-overload]
        self._trainer(job).train(resume_from_checkpoint=resume)

    def evaluate(self, job: Job) -> float:
        return float(self._trainer(job).evaluate()["eval_loss"])

    def metric(self, job: Job) -> float:
        return float(self._trainer(job).evaluate()["eval_metric"])

    def contrast(self, job: Job) -> None:
        trainer = self._trainer(job)
        gather = trainer.processes.gather
        model: Any = trainer.model
        model.job = job.but(loss=job.contrastive(gather))
        trainer.train()

    def logged(self, job: Job) -> list[float]:
        trainer = self._trainer(job)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def gather(self, job: Job, outputs: Callable[[Tensor], Any]) -> list[Any]:
        trainer = self._trainer(job, outputs)
        return [trainer.predict(job.data(job.samples)).predictions]  # type: ignore[arg-type]

    def skips(self, job: Job) -> int | None:
        trainer = self._trainer(job)
        trainer.processes.scaler = torch.amp.GradScaler("cpu")  # made on GPUs by itself
        trainer.processes.native_amp = True
        trainer.train()
        return int(trainer.lr_scheduler.last_epoch)  # type: ignore[union-attr]

    def checkpoints(self, folder: Path) -> list[Path]:
        return by_number(folder.glob("checkpoint-*"))


def _metric(job: Job) -> Callable[[Any], dict[str, float]]:
    def compute(found: Any) -> dict[str, float]:
        outputs, labels = map(torch.as_tensor, (found.predictions, found.label_ids))
        return {"metric": scored.function(job.metric)(outputs, labels)}

    return compute


def _of_tokens(job: Job) -> Callable[..., Tensor]:
    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        value = job.loss(outputs["logits"], labels)
        if num_items_in_batch is None:
            return value
        assert job.weigh is not None
        return value * job.weigh(labels) / num_items_in_batch

    return loss


FRAMEWORK = Transformers()
