"""torchtnt: `AutoUnit`, `train` and `DistributedCheckpointSaver`; loaders are the user's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.callbacks import DistributedCheckpointSaver
from torchtnt.framework.fit import fit
from torchtnt.framework.train import train
from torchtnt.utils import init_from_env
from torchtnt.utils.distributed import all_gather_tensors
from torchtnt.utils.env import seed

from benchmarks.behaviour.job import (
    NO_CHECK,
    TORCH_GATHER,
    Framework,
    Job,
    by_number,
    option,
    size_of_world,
)

_DATA = "loaders are the user's; with torch's DistributedSampler"


class _Unit(AutoUnit[Any]):
    job: Job

    def compute_loss(self, state: Any, data: Any) -> tuple[Tensor, Any]:
        x, y = data
        outputs = self.module(x)
        return self.job.loss(outputs, y), outputs

    def configure_optimizers_and_lr_scheduler(self, module: Any) -> tuple[Any, Any]:
        optimizer = self.job.optimizer(module.parameters())
        return optimizer, self.job.scheduler(optimizer)


class Torchtnt(Framework):
    """Saves and restores by its callback, which takes the loader if that has a state."""

    package = "torchtnt"
    variants: ClassVar = {
        "contrastive": [TORCH_GATHER],
        "rank_augmentation": [option("seed(seed + rank)", seed_by_rank=True)],
        "resume_order": [option("torchdata's StatefulDataLoader", stateful=True)],
        "resume_augmentation": [option("torchdata's StatefulDataLoader", stateful=True)],
    }
    not_offered: ClassVar = {
        "sigterm": "it does not handle signals",
        "evaluation": "metrics are the user's",
        "auroc": "metrics are the user's",
        "segmentation": "metrics are the user's",
        "eval_figure": "metrics are the user's",
        "constant": "metrics are the user's",
        "gather_texts": "it gathers tensors",
        "custom_sampler": "loaders are the user's",
        "custom_batches": "loaders are the user's",
        "elastic": "loaders are the user's",
    }
    left_to_users: ClassVar = {
        **dict.fromkeys(["each_once", "iterable", "small", "same_updates"], _DATA),
        "replica": NO_CHECK,
        "rates_differ": NO_CHECK,
    }

    def _unit(self, job: Job) -> _Unit:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        seed(rank if "seed_by_rank" in job.options else 0)
        kind = type("_Unit", (_Unit,), {"job": job})
        return kind(  # type: ignore[no-any-return]
            module=job.model(job.samples),
            device=torch.device("cpu"),
            strategy="ddp" if size_of_world() > 1 else None,
            **({} if job.make_scheduler is not None else {"step_lr_interval": "step"}),
            gradient_accumulation_steps=job.accumulation,
        )

    def _loader(self, job: Job) -> Any:
        loader = job.loader(distributed=size_of_world() > 1)
        if "stateful" not in job.options:
            return loader
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(loader.dataset, job.batch, shuffle=job.shuffle)

    def train(self, job: Job) -> None:
        self._run(job)

    def _run(self, job: Job, prepare: Callable[[_Unit], None] | None = None) -> _Unit:
        if size_of_world() > 1:
            init_from_env(device_type="cpu")
        unit, loader = self._unit(job), self._loader(job)
        if prepare is not None:
            prepare(unit)
        callbacks: list[Any] = []
        if job.save_every is not None:
            callbacks = [
                DistributedCheckpointSaver(
                    str(job.folder),
                    save_every_n_train_steps=job.save_every,
                    keep_last_n_checkpoints=job.keep,
                    async_checkpoint=job.options.get("asynchronous", False),
                )
            ]
        if job.resume == "auto":
            DistributedCheckpointSaver.restore_from_latest(
                str(job.folder), unit, train_dataloader=loader
            )
        elif job.resume is not None:
            DistributedCheckpointSaver.restore(str(job.resume), unit, train_dataloader=loader)
        train(unit, loader, max_epochs=job.epochs, callbacks=callbacks)
        return unit

    def contrast(self, job: Job) -> None:
        def gather(rows: Tensor) -> Tensor:
            return torch.cat(all_gather_tensors(rows))

        self.train(job.but(loss=job.contrastive(gather)))

    def break_early(self, job: Job) -> None:
        fit(
            self._unit(job),
            self._loader(job),
            self._loader(job),
            max_epochs=1,
            max_eval_steps_per_epoch=1,
            evaluate_every_n_steps=2,
        )

    def skips(self, job: Job) -> int | None:
        def prepare(unit: _Unit) -> None:
            unit.grad_scaler = torch.amp.GradScaler("cpu")  # made for GPUs by precision="fp16"

        unit = self._run(job, prepare)
        assert unit.lr_scheduler is not None
        return int(unit.lr_scheduler.last_epoch)

    def checkpoints(self, folder: Path) -> list[Path]:
        return by_number(path for path in folder.glob("epoch_*") if (path / ".metadata").exists())


FRAMEWORK = Torchtnt()
