"""ignite: `create_supervised_trainer`, `idist` and its handlers."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from ignite.metrics import (
    Average,
    ConfusionMatrix,
    EpochMetric,
    Loss,
    RunningAverage,
    mIoU,
)
from ignite.utils import manual_seed
from torch import Tensor
from torch.utils.data import IterableDataset

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

logging.disable(logging.INFO)
warnings.filterwarnings("ignore", module="ignite")


class Ignite(Framework):
    """`Checkpoint` with `DiskSaver`; the newest file is taken for resuming, as its examples do."""

    package = "pytorch-ignite"
    variants: ClassVar = {
        "contrastive": [TORCH_GATHER],
        "resume_order": [option(deterministic=True)],
        "resume_augmentation": [option(deterministic=True)],
        "elastic": [option(deterministic=True)],
        "iterable": [
            Variant("a data set that splits itself over workers", {"data": toys.SplitStream})
        ],
        "eval_figure": [option("Average of a row for each sample", by_sample=True)],
        "rank_augmentation": [option("manual_seed(seed + rank)", seed_by_rank=True)],
    }
    left_to_users: ClassVar = {
        "schedule_unit": "the user says at which event it moves",
        "replica": NO_CHECK,
        "rates_differ": NO_CHECK,
    }
    not_offered: ClassVar = {
        "sigterm": "it does not handle signals",
        "background": "saves are in the foreground",
        "kill_three": "the user chooses the file",
        "torn": "the user chooses the file",
        "gather_ragged": "all_gather is for tensors of one shape",
    }
    uneven = toys.OwnShare

    def _start(self, job: Job) -> None:
        if size_of_world() > 1:
            idist.initialize("gloo")
        manual_seed(idist.get_rank() if "seed_by_rank" in job.options else 0)

    def _loader(self, job: Job) -> Any:
        data = job.data(job.samples)
        if job.sampler is not None and job.batches:
            return idist.auto_dataloader(data, batch_sampler=job.sampler(data))
        options: dict[str, Any] = {"batch_size": job.batch * idist.get_world_size()}
        if job.workers:
            options["num_workers"] = job.workers * idist.get_world_size()
        if job.sampler is not None:
            options["sampler"] = job.sampler(data)
        elif not isinstance(data, IterableDataset):
            options["shuffle"] = job.shuffle
        return idist.auto_dataloader(data, collate_fn=job.collate, **options)

    def _trainer(self, job: Job) -> tuple[Any, dict[str, Any]]:
        self._start(job)
        model = idist.auto_model(job.model(job.samples))
        optimizer = idist.auto_optim(job.optimizer(model.parameters()))
        scaler = torch.amp.GradScaler("cpu") if job.overflow else False
        trainer = create_supervised_trainer(
            model,
            optimizer,
            job.loss,
            deterministic=job.options.get("deterministic", False),
            gradient_accumulation_steps=job.accumulation,
            amp_mode="amp" if job.overflow else None,
            scaler=scaler,
        )
        parts = {"model": model, "optimizer": optimizer, "trainer": trainer}
        scheduler = job.scheduler(optimizer)
        if scheduler is not None:
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
            parts["scheduler"] = scheduler
        return trainer, parts

    def train(self, job: Job) -> None:
        self._run(*self._trainer(job), job)

    def _run(self, trainer: Any, parts: dict[str, Any], job: Job) -> None:
        if job.save_every is not None:
            saver = DiskSaver(str(job.folder), create_dir=True, require_empty=False)
            steps = global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
            handler = Checkpoint(parts, saver, n_saved=job.keep, global_step_transform=steps)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(every=job.save_every), handler)
        if job.resume is not None:
            Checkpoint.load_objects(parts, torch.load(job.resume, weights_only=False))
        trainer.run(self._loader(job), max_epochs=job.epochs)

    def evaluate(self, job: Job) -> float:
        self._start(job)
        model = idist.auto_model(job.model(job.samples))
        evaluator = create_supervised_evaluator(model, {"loss": Loss(job.loss)})
        return float(evaluator.run(self._loader(job)).metrics["loss"])

    def metric(self, job: Job) -> float:
        self._start(job)
        model = idist.auto_model(job.model(job.samples))
        if job.metric == "auroc":
            metric: Any = EpochMetric(scored.function(job.metric))
        else:
            metric = mIoU(ConfusionMatrix(scored.CLASSES))
        evaluator = create_supervised_evaluator(model, {"metric": metric})
        return float(evaluator.run(self._loader(job)).metrics["metric"])

    def log_in_evaluation(self, job: Job) -> float:
        trainer, parts = self._trainer(job)
        by_sample = "by_sample" in job.options
        evaluator = create_supervised_evaluator(
            parts["model"],
            output_transform=lambda x, y, y_pred: (
                y.square()[:, None] if by_sample else y.square().mean().item()
            ),
        )
        Average().attach(evaluator, "figure")
        loader = self._loader(job)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(loader))
        self._run(trainer, parts, job)
        return float(evaluator.state.metrics["figure"])

    def contrast(self, job: Job) -> None:
        gather: Any = idist.all_gather
        self.train(job.but(loss=job.contrastive(gather)))

    def logged(self, job: Job) -> list[float]:
        trainer, parts = self._trainer(job)
        RunningAverage(alpha=0.5, output_transform=lambda loss: loss).attach(trainer, "loss")
        losses: list[float] = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.metrics["loss"])
        )
        self._run(trainer, parts, job)
        return losses

    def gather(self, job: Job, outputs: Callable[[Tensor], Any]) -> list[Any]:
        self._start(job)
        rounds = [idist.all_gather(outputs(x)) for x, _ in self._loader(job)]
        return [
            rows for found in rounds for rows in (found if isinstance(found, list) else [found])
        ]

    def break_early(self, job: Job) -> None:
        trainer, parts = self._trainer(job)
        evaluator = create_supervised_evaluator(parts["model"])
        loader = self._loader(job)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=2), lambda: evaluator.run(loader, epoch_length=1)
        )
        self._run(trainer, parts, job)

    def skips(self, job: Job) -> int | None:
        trainer, parts = self._trainer(job)
        self._run(trainer, parts, job)
        return int(parts["scheduler"].last_epoch)

    def checkpoints(self, folder: Path) -> list[Path]:
        return by_number(folder.glob("*.pt"))


FRAMEWORK = Ignite()
