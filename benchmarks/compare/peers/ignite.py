"""PyTorch Ignite: an Engine around a step of one's own, as its documentation shows it."""

from collections.abc import Callable

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch import nn

from benchmarks.compare.evaluation import Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.training import LOG_EVERY, Parts, Training

PACKAGE = "pytorch-ignite"


def training(task: Training, parts: Parts) -> None:
    """Train with an `Engine`."""
    model, loader = parts.model, parts.loader
    if task.processes > 1:
        if idist.get_world_size() == 1:
            idist.initialize("gloo")
        model = idist.auto_model(model)
        loader = idist.auto_dataloader(
            parts.dataset, batch_size=task.batch_size * task.processes, shuffle=False
        )
    optimizer = idist.auto_optim(parts.make_optimizer(model.parameters()))

    def step(engine: Engine, batch: object) -> torch.Tensor:
        model.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=task.bf16):
            loss = parts.loss(model, batch) / task.accumulation
        loss.backward()
        if engine.state.iteration % task.accumulation == 0:
            if task.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    trainer = Engine(step)
    if task.extras:
        _attach_extras(trainer, parts, optimizer)
    trainer.run(loader, max_epochs=task.epochs)


def _attach_extras(trainer: Engine, parts: Parts, optimizer: torch.optim.Optimizer) -> None:
    from ignite.handlers import Checkpoint, DiskSaver, ProgressBar, TensorboardLogger

    ProgressBar().attach(trainer, output_transform=lambda loss: {"loss": loss.item()})
    logger = TensorboardLogger(log_dir=str(parts.folder / "tensorboard"))
    logger.attach_output_handler(
        trainer,
        event_name=Events.ITERATION_COMPLETED(every=LOG_EVERY),
        tag="train",
        output_transform=lambda loss: {"loss": loss.item()},
    )
    state = {"model": parts.model, "optimizer": optimizer, "trainer": trainer}
    saver = DiskSaver(str(parts.folder / "checkpoints"), create_dir=True)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(state, saver, n_saved=1))
    trainer.add_event_handler(Events.COMPLETED, lambda: logger.close())


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with its evaluator and its accuracy."""
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Accuracy

    if idist.get_world_size() == 1:
        idist.initialize("gloo")
    loader = idist.auto_dataloader(
        parts.dataset, batch_size=task.batch_size * task.processes, shuffle=False
    )
    evaluator = create_supervised_evaluator(parts.model, {"accuracy": Accuracy()})
    return lambda: evaluator.run(loader).metrics["accuracy"]


def gathering(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate with `all_gather` of every batch."""
    if idist.get_world_size() == 1:
        idist.initialize("gloo")
    loader = idist.auto_dataloader(
        parts.dataset, batch_size=task.batch_size * task.processes, shuffle=False
    )
    model = parts.model.eval()

    def evaluate() -> float:
        right = total = 0
        with torch.no_grad():
            for inputs, targets in loader:
                predictions = idist.all_gather(model(inputs).argmax(-1))
                references = idist.all_gather(targets)
                right += (predictions == references).sum()
                total += len(references)
        return int(right) / total

    return evaluate


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Save with `Checkpoint`."""
    from ignite.handlers import Checkpoint, DiskSaver

    saver = DiskSaver(str(parts.folder), create_dir=True, require_empty=False)
    checkpoint = Checkpoint({"model": parts.model, "optimizer": parts.optimizer}, saver)
    return lambda: checkpoint(Engine(lambda engine, batch: None))


def loading(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Load with `Checkpoint.load_objects`."""
    from ignite.handlers import Checkpoint

    (path,) = parts.folder.glob("*.pt")
    objects = {"model": parts.model, "optimizer": parts.optimizer}
    return lambda: Checkpoint.load_objects(objects, torch.load(path))
