"""trainkit: `Trainer`, and `Accelerator` where a loop of one's own is asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from benchmarks.behaviour import scored, toys
from benchmarks.behaviour.job import Framework, Job
from trainkit import Accelerator, Callback, Run, StepOutput, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.precision import FP16


class _Weighted(Trainer):
    """Says over how many tokens a loss is a mean."""

    job: Job

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        x, y = batch
        assert self.job.weigh is not None
        return StepOutput(self.job.loss(model(x), y), weight=self.job.weigh(y))


class _Terms(Trainer):
    """Says over how many items each term of a loss is a mean."""

    job: Job

    def training_step(self, model: nn.Module, batch: Any) -> dict[str, StepOutput]:
        x, y = batch
        assert self.job.terms is not None
        found = self.job.terms(model(x), y)
        return {name: StepOutput(loss, weight=count) for name, (loss, count) in found.items()}


class _Contrastive(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.run is not None
        embeddings, numbers = model(batch[0]), batch[1]
        others = self.run.gather(embeddings, differentiable=True)
        return toys.contrastive(embeddings, numbers, others, self.run.gather(numbers))


class _Logging(Trainer):
    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        assert self.run is not None
        self.run.log({"figure": batch[1].square().mean()})
        return super().evaluation_step(model, batch)


class _Figures(Callback):
    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.figures = metrics


class _Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.losses.append(values["loss"])


class Trainkit(Framework):
    """Nothing is switched on anywhere."""

    package = "trainkit"

    def _trainer(self, job: Job, **settings: Any) -> Trainer:
        callbacks = settings.pop("callbacks", [])
        if job.save_every is not None:
            background = job.options.get("background", False)
            callbacks.append(
                Checkpoint(every_n_steps=job.save_every, keep_last=job.keep, background=background)
            )
        default = _Terms if job.terms is not None else Trainer
        kind = settings.pop("kind", _Weighted if job.weigh is not None else default)
        trainer = kind(
            max_epochs=job.epochs,
            gradient_accumulation_steps=job.accumulation,
            callbacks=callbacks,
            output_dir=job.folder,
            **settings,
        )
        if isinstance(trainer, _Weighted | _Terms):
            trainer.job = job
        return trainer

    def _fit(self, trainer: Trainer, job: Job, *, evaluates: bool = False) -> None:
        scheduler = job.scheduler if job.has_scheduler else None
        trainer.fit(
            job.model(job.samples),
            (job.loader(), job.loader()) if evaluates else job.loader(),
            optimizer=job.optimizer,
            lr_scheduler=scheduler,
            loss_fn=job.loss,
            resume=job.resume,
        )

    def train(self, job: Job) -> None:
        self._fit(self._trainer(job), job)

    def evaluate(self, job: Job) -> float:
        trainer = self._trainer(job)
        loader = job.loader()
        return trainer.evaluate(job.model(job.samples), loader, loss_fn=job.loss)["eval/loss"]

    def metric(self, job: Job) -> float:
        trainer = self._trainer(job)
        metrics = [scored.metric(job.metric)]
        module, loader = job.model(job.samples), job.loader()
        figures = trainer.evaluate(module, loader, loss_fn=job.loss, metrics=metrics)
        return next(value for name, value in figures.items() if name != "eval/loss")

    def log_in_evaluation(self, job: Job) -> float:
        figures = _Figures()
        trainer = self._trainer(job, kind=_Logging, callbacks=[figures])
        self._fit(trainer, job, evaluates=True)
        return figures.figures["eval/figure"]

    def contrast(self, job: Job) -> None:
        self._fit(self._trainer(job, kind=_Contrastive), job)

    def logged(self, job: Job) -> list[float]:
        losses = _Losses()
        self._fit(self._trainer(job, callbacks=[losses], log_every_n_steps=1), job)
        return losses.losses

    def gather(self, job: Job, outputs: Callable[[Tensor], Any]) -> list[Any]:
        accelerator = Accelerator()
        loader = accelerator.prepare(job.loader())
        return [accelerator.gather_for_metrics(outputs(x)) for x, _ in loader]

    def break_early(self, job: Job) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=job.accumulation)
        model = job.model(job.samples)
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
        trainer = self._trainer(job, precision=FP16())
        self._fit(trainer, job)
        assert trainer.run is not None
        assert trainer.run.state.skipped_steps == 1
        return int(trainer.run.lr_schedule.scheduler.last_epoch)

    def checkpoints(self, folder: Path) -> list[Path]:
        return sorted((folder / "checkpoints").glob("step-*"))

    def command(self, size: int) -> list[str]:
        return ["-m", "trainkit.cli", "launch", "--num_processes", str(size)]


FRAMEWORK = Trainkit()
