"""The Trainer of transformers."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.data import default_collate
from typing_extensions import override

from benchmarks.compare.evaluation import Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.training import LOG_EVERY, Parts, Training
from benchmarks.compare.workload import Unsupported

PACKAGE = "transformers"

transformers.logging.set_verbosity_error()


class Trainer(transformers.Trainer):
    """With a loss of one's own, for models that compute none."""

    parts: Parts

    @override
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.parts.loss(model, inputs)


def training(task: Training, parts: Parts) -> None:
    """Train with `Trainer.train`."""
    arguments = transformers.TrainingArguments(
        output_dir=str(parts.folder),
        use_cpu=True,
        num_train_epochs=task.epochs,
        per_device_train_batch_size=task.batch_size,
        gradient_accumulation_steps=task.accumulation,
        max_grad_norm=task.max_norm or 0.0,
        bf16=task.bf16,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        dataloader_num_workers=task.workers,
        dataloader_persistent_workers=task.workers > 0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **(_extras() if task.extras else _nothing()),
    )
    kind = transformers.Trainer if parts.loss_fn is None else Trainer
    trainer = kind(
        model=parts.model,
        args=arguments,
        train_dataset=parts.dataset,
        data_collator=default_collate,
        optimizers=(parts.make_optimizer(parts.model.parameters()), None),
    )
    trainer.parts = parts
    trainer.train()


def _nothing() -> dict[str, Any]:
    return {
        "report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def _extras() -> dict[str, Any]:
    return {
        "report_to": "tensorboard", "logging_steps": LOG_EVERY, "save_strategy": "epoch",
        "disable_tqdm": False,
    }  # fmt: skip


class _Outputs(torch.nn.Module):
    """The model in the form that the Trainer asks for."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with `Trainer.evaluate`."""
    arguments = transformers.TrainingArguments(
        output_dir="unused",
        use_cpu=True,
        per_device_eval_batch_size=task.batch_size,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["labels"],
        prediction_loss_only=False,
        **_nothing(),
    )

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        inputs, labels = default_collate(samples)
        return {"inputs": inputs, "labels": labels}

    trainer = transformers.Trainer(
        model=_Outputs(parts.model),
        args=arguments,
        eval_dataset=parts.dataset,
        data_collator=collate,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda p: {"accuracy": float((p.predictions == p.label_ids).mean())},
    )
    return lambda: trainer.evaluate()["eval_accuracy"]


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Not by itself."""
    raise Unsupported("saves and loads only inside train")


loading = saving
