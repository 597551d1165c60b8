"""Accelerate: the loop of its documentation, with `accumulate` and the order of its examples."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    set_seed,
)
from torch import Tensor

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


class _Place:
    """Where a training is; registered for checkpointing, as users do."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


LOADER = ("use_seedable_sampler", "use_stateful_dataloader", "split_batches", "dispatch_batches")

RESUMING = [
    option(use_seedable_sampler=True),
    option(
        "use_seedable_sampler=True and loader.set_epoch()",
        use_seedable_sampler=True,
        set_epoch=True,
    ),
    option(use_stateful_dataloader=True),
    option(use_seedable_sampler=True, use_stateful_dataloader=True),
]


class Accelerate(Framework):
    """`save_state` and `skip_first_batches` for checkpoints."""

    package = "accelerate"
    variants: ClassVar = {
        "contrastive": [TORCH_GATHER],
        "overflow": [Variant("AdamW(fused=False)", {"optimizer": toys.Unfused})],
        "resume_order": RESUMING,
        "resume_augmentation": RESUMING,
        "elastic": [option(use_seedable_sampler=True)],
        "same_updates": [
            option(use_seedable_sampler=True),
            Variant(
                "split_batches=True, use_seedable_sampler=True",
                {"options": {"split_batches": True, "use_seedable_sampler": True}},
            ),
        ],
        "tokens_accumulation": [option("its documented recipe in the user's loop", recipe=True)],
        "tokens_processes": [option("its documented recipe in the user's loop", recipe=True)],
        "rank_augmentation": [option("set_seed(device_specific=True)", device_specific=True)],
        "scheduler": [option(step_scheduler_with_optimizer=False)],
        "each_once": [option(dispatch_batches=True)],
        "gather_texts": [option(use_gather_object=True)],
        "gather_ragged": [option("pad_across_processes(dim=1)", pad=True)],
    }
    left_to_users: ClassVar = {
        "schedule_unit": "the loop steps it",
        "replica": NO_CHECK,
        "rates_differ": NO_CHECK,
    }
    not_offered: ClassVar = {
        "eval_figure": "evaluation loops are the user's",
        "sigterm": "it does not handle signals",
        "background": "saves are in the foreground",
    }

    def _accelerator(self, job: Job, **more: Any) -> Accelerator:
        loader = {name: job.options[name] for name in LOADER if name in job.options}
        if "step_scheduler_with_optimizer" in job.options:
            more["step_scheduler_with_optimizer"] = False
        project = ProjectConfiguration(
            project_dir=job.folder and str(job.folder),
            automatic_checkpoint_naming=True,
            total_limit=job.keep,
        )
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=job.accumulation,
            dataloader_config=DataLoaderConfiguration(**loader),
            project_config=project,
            **more,
        )
        set_seed(0, device_specific=job.options.get("device_specific", False))
        return accelerator

    def _loader(self, accelerator: Accelerator, job: Job) -> Any:
        if job.options.get("split_batches"):
            job = job.but(batch=job.batch * accelerator.num_processes)
        return accelerator.prepare(job.loader())

    def train(self, job: Job) -> None:
        if "recipe" in job.options:
            self._train_by_tokens(job)
        else:
            self._train(job)

    def _train(self, job: Job) -> None:
        accelerator = self._accelerator(job)
        model: Any = job.model(job.samples)
        loader = self._loader(accelerator, job)
        optimizer = job.optimizer(model.parameters())
        scheduler = job.scheduler(optimizer)
        model, optimizer = accelerator.prepare(model, optimizer)
        scheduler = scheduler and accelerator.prepare(scheduler)
        place = _Place()
        accelerator.register_for_checkpointing(place)
        if job.resume is not None:
            accelerator.load_state(None if job.resume == "auto" else str(job.resume))
        for epoch in range(place.epoch, job.epochs):
            batches = loader
            if job.options.get("set_epoch"):
                loader.set_epoch(epoch)
            if place.batch and not job.options.get("use_stateful_dataloader"):
                batches = accelerator.skip_first_batches(loader, place.batch)
            for x, y in batches:
                place.batch += 1
                with accelerator.accumulate(model):
                    accelerator.backward(job.loss(model(x), y))
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()
                if job.save_every is not None and place.batch % job.save_every == 0:
                    accelerator.save_state()
            place.epoch, place.batch = epoch + 1, 0

    def _train_by_tokens(self, job: Job) -> None:
        """Follow the recipe of its guide to gradient accumulation, for one epoch."""
        accelerator = self._accelerator(job)
        model: Any = job.model(job.samples)
        optimizer: Any = job.optimizer(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, job.loader())
        batches, weigh = iter(loader), job.weigh
        assert weigh is not None
        while window := list(islice(batches, job.accumulation)):
            items = accelerator.gather(sum(weigh(y) for _, y in window)).sum().item()
            factor = job.accumulation * accelerator.num_processes / items
            for number, (x, y) in enumerate(window, 1):
                inside = number < len(window) and accelerator.num_processes > 1
                with model.no_sync() if inside else nullcontext():
                    accelerator.backward(job.loss(model(x), y) * weigh(y) * factor)
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self, job: Job) -> float:
        accelerator = self._accelerator(job)
        model = accelerator.prepare(job.model(job.samples)).eval()
        losses = []
        for x, y in accelerator.prepare(job.loader()):
            with torch.no_grad():
                outputs = model(x)
            outputs, y = accelerator.gather_for_metrics((outputs, y))
            losses += [job.loss(o, t).item() for o, t in zip(outputs, y, strict=True)]
        return sum(losses) / len(losses)

    def metric(self, job: Job) -> float:
        accelerator = self._accelerator(job)
        model = accelerator.prepare(job.model(job.samples)).eval()
        found = []
        for x, y in accelerator.prepare(job.loader()):
            with torch.no_grad():
                outputs = model(x)
            found.append(accelerator.gather_for_metrics((outputs, y)))
        outputs, targets = (torch.cat(parts) for parts in zip(*found, strict=True))
        return scored.function(job.metric)(outputs, targets)

    def contrast(self, job: Job) -> None:
        gather = self._accelerator(job).gather
        self.train(job.but(loss=job.contrastive(gather)))

    def gather(self, job: Job, outputs: Callable[[Tensor], Any]) -> list[Any]:
        accelerator = self._accelerator(job)
        found = []
        for x, _ in accelerator.prepare(job.loader()):
            rows = outputs(x)
            if "pad" in job.options:
                rows = accelerator.pad_across_processes(rows, dim=1)
            object_too = job.options.get("use_gather_object", False)
            found.append(accelerator.gather_for_metrics(rows, use_gather_object=object_too))
        return found

    def break_early(self, job: Job) -> None:
        accelerator = self._accelerator(job)
        model: Any = job.model(job.samples)
        optimizer = job.optimizer(model.parameters())
        evaluation = accelerator.prepare(job.loader())
        model, optimizer, loader = accelerator.prepare(model, optimizer, job.loader())
        for number, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(job.loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if number == 1:
                for _ in evaluation:
                    break

    def skips(self, job: Job) -> int | None:
        accelerator = self._accelerator(job, mixed_precision="fp16")
        accelerator.scaler = torch.amp.GradScaler("cpu")  # which it makes on GPUs by itself
        model: Any = job.model(job.samples)
        optimizer: Any = job.optimizer(model.parameters())
        scheduler: Any = job.scheduler(optimizer)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        for x, y in accelerator.prepare(job.loader()):
            accelerator.backward(job.loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return int(scheduler.scheduler.last_epoch)

    def checkpoints(self, folder: Path) -> list[Path]:
        return by_number((folder / "checkpoints").glob("checkpoint_*"))


FRAMEWORK = Accelerate()
