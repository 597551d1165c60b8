"""trainkit's Trainer, as its README shows it."""

from collections.abc import Callable

import torch

from benchmarks.compare.evaluation import Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.sharding import Sharding
from benchmarks.compare.training import LOG_EVERY, Parts, Training
from trainkit import Callback, Trainer

PACKAGE = "trainkit"


def training(task: Training, parts: Parts) -> None:
    """Train with `Trainer.fit`."""
    callbacks: list[Callback] = []
    if task.extras:
        from trainkit.callbacks import Checkpoint, ProgressBar, TensorBoardLogger

        callbacks = [ProgressBar(), TensorBoardLogger(), Checkpoint()]
    trainer = Trainer(
        max_epochs=task.epochs,
        precision="bf16" if task.bf16 else "fp32",
        gradient_accumulation_steps=task.accumulation,
        max_grad_norm=task.max_norm,
        callbacks=callbacks,
        output_dir=parts.folder if task.extras else None,
        log_every_n_steps=LOG_EVERY,
    )
    trainer.fit(parts.model, parts.loader, optimizer=parts.make_optimizer, loss_fn=parts.loss_fn)


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with `Trainer.evaluate`."""
    trainer = Trainer(max_epochs=1, callbacks=[])
    return lambda: trainer.evaluate(parts.model, parts.loader, metrics=["accuracy"])[
        "eval/accuracy"
    ]


def gathering(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate in an own loop, with `Accelerator.gather_for_metrics`."""
    from trainkit import Accelerator, metrics

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(parts.model, parts.loader)
    model.eval()
    accuracy = metrics.load("accuracy")

    def evaluate() -> float:
        with torch.no_grad():
            for inputs, targets in loader:
                classes = model(inputs).argmax(-1)
                predictions, references = accelerator.gather_for_metrics((classes, targets))
                accuracy.add_batch(predictions=predictions, references=references)
        return accuracy.compute()["accuracy"]

    return evaluate


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Save with `Accelerator.save_state`: synced, committed at once, with a digest."""
    from trainkit import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(parts.model, parts.optimizer)
    return lambda: accelerator.save_state(parts.folder / "state")


def loading(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Load with `Accelerator.load_state`, which checks the digests."""
    from trainkit import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(parts.model, parts.optimizer)
    return lambda: accelerator.load_state(parts.folder / "state")


def sharding(task: Sharding, parts: Parts) -> None:
    """Train with `Trainer.fit`."""
    trainer = Trainer(max_epochs=task.epochs, strategy="fsdp", callbacks=[])
    trainer.fit(parts.model, parts.loader, optimizer=parts.make_optimizer)
