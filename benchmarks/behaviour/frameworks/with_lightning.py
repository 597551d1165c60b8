"""Lightning: a `LightningModule` and the `Trainer`."""

import logging
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks, seed_everything
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from torch import Tensor

from benchmarks.behaviour import scored, toys
from benchmarks.behaviour.job import (
    NO_CHECK,
    Framework,
    Job,
    Variant,
    by_number,
    option,
    size_of_world,
)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class _Module(LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.model = job, job.model(job.samples)
        self.losses: list[float] = []
        self.metric: Any = None

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = self.job.loss(self.model(x), y)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        if self.metric is not None:
            self.metric.update(self.model(x), y)
            self.log("metric", self.metric)
        self.log("val", self.job.loss(self.model(x), y), sync_dist=True, batch_size=len(x))

    def configure_optimizers(self) -> Any:
        optimizer = self.job.optimizer(self.parameters())
        if self.job.make_scheduler is not None:
            return [optimizer], [self.job.scheduler(optimizer)]
        if self.job.schedule is None:
            return optimizer
        scheduler = {"scheduler": self.job.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class _Contrastive(_Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        embeddings, numbers = self.model(batch[0]), batch[1]
        others = self.all_gather(embeddings, sync_grads=True).flatten(0, -2)  # type: ignore[union-attr]
        theirs = self.all_gather(numbers).flatten()  # type: ignore[union-attr]
        return toys.contrastive(embeddings, numbers, others, theirs)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        """There is no figure to keep."""


class _Logging(_Module):
    def validation_step(self, batch: Any, index: int) -> None:
        options = {"sync_dist": True} if self.job.options.get("sync_dist") else {}
        self.log("figure", batch[1].square().mean(), **options)


class Lightning(Framework):
    """`ModelCheckpoint` for checkpoints."""

    package = "lightning"
    variants: ClassVar = {
        "rank_augmentation": [
            Variant(
                "seed_everything(workers=True) and a worker",
                {"workers": 1, "options": {"seed_workers": True}},
            )
        ],
        "sigterm": [option("ModelCheckpoint(save_on_exception=True)", save_on_exception=True)],
        "eval_figure": [option("log(sync_dist=True)", sync_dist=True)],
        "iterable": [
            Variant("a data set that splits itself over workers", {"data": toys.SplitStream})
        ],
    }
    not_offered: ClassVar = {
        "gather_texts": "all_gather is for tensors",
        "gather_ragged": "all_gather is for tensors of one shape",
    }
    left_to_users: ClassVar = {"replica": NO_CHECK, "rates_differ": NO_CHECK}
    uneven = toys.OwnShare

    def _trainer(self, job: Job, **settings: Any) -> Trainer:
        seed_everything(0, workers="seed_workers" in job.options, verbose=False)
        size = job.options.get("devices", size_of_world())
        saving: list[Any] = []
        if job.save_every is not None:
            saving = [self._saving(job)]
        return Trainer(
            accelerator="cpu",
            devices=size,
            strategy="ddp" if size > 1 else "auto",
            max_epochs=job.epochs,
            accumulate_grad_batches=job.accumulation,
            callbacks=saving,
            enable_checkpointing=bool(saving),
            default_root_dir=job.folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
            **settings,
        )

    def _saving(self, job: Job) -> Any:
        options = {}
        if job.options.get("save_on_exception"):
            options["save_on_exception"] = True
        if job.keep is None or job.keep > 1:
            options |= {"monitor": "step", "mode": "max"}
        return callbacks.ModelCheckpoint(
            dirpath=job.folder,
            filename="{step}",
            every_n_train_steps=job.save_every,
            save_top_k=-1 if job.keep is None else job.keep,
            save_last=True if job.keep is not None and job.keep > 1 else None,
            **options,
        )

    def _fit(self, job: Job, **settings: Any) -> _Module:
        module = _Module(job)
        if job.options.get("asynchronous"):
            settings["plugins"] = [AsyncCheckpointIO()]
        path = {"auto": "last", None: None}.get(job.resume, job.resume)  # type: ignore[call-overload]
        trainer = self._trainer(job, **settings)
        trainer.fit(module, job.loader(), ckpt_path=path, weights_only=False)
        return module

    def train(self, job: Job) -> None:
        self._fit(job)

    def evaluate(self, job: Job) -> float:
        trainer = self._trainer(job)
        return float(trainer.validate(_Module(job), job.loader(), verbose=False)[0]["val"])

    def metric(self, job: Job) -> float:
        module = _Module(job)
        module.metric = scored.metric(job.metric)
        trainer = self._trainer(job)
        return float(trainer.validate(module, job.loader(), verbose=False)[0]["metric"])

    def log_in_evaluation(self, job: Job) -> float:
        trainer = self._trainer(job)
        trainer.fit(_Logging(job), job.loader(), job.loader())
        return float(trainer.callback_metrics["figure"])

    def contrast(self, job: Job) -> None:
        self._trainer(job).fit(_Contrastive(job), job.loader())

    def logged(self, job: Job) -> list[float]:
        return self._fit(job).losses

    def break_early(self, job: Job) -> None:
        trainer = self._trainer(job, limit_val_batches=1, val_check_interval=2)
        trainer.fit(_Module(job), job.loader(), job.loader())

    def skips(self, job: Job) -> int | None:
        precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
        module = self._fit(job, plugins=[precision])
        return int(module.lr_schedulers().last_epoch)  # type: ignore[union-attr]

    def checkpoints(self, folder: Path) -> list[Path]:
        return by_number(folder.glob("*.ckpt"))

    def command(self, size: int) -> list[str]:
        return []  # the Trainer starts the other processes itself


FRAMEWORK = Lightning()
