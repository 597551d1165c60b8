"""The same program as a user of trainkit writes it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.right_programs.by_hand import MIN_DELTA, Outcome, first_layer, planned, state_of, whole
from tests.right_programs.data import evaluation_loader, training_loader
from tests.right_programs.losses import loss_fn, mean_loss, weight_of
from tests.right_programs.models import make_model
from tests.right_programs.optimizers import make_optimizer, options_of
from tests.right_programs.program import BY_NAME, STEPS, Program
from tests.right_programs.schedules import make_schedule
from trainkit import Callback, LRSchedule, Run, StepOutput, Trainer, callbacks
from trainkit.callbacks import EMA, Checkpoint, EarlyStopping, Evaluation, FreezeUntil
from trainkit.precision import FP16
from trainkit.strategies import DDP

__all__ = ["fit"]


class Recorder(Callback):
    """Keeps what is evaluated and logged, and asks for an evaluation."""

    def __init__(self, out: Outcome, ask_at: int | None) -> None:
        self.out = out
        self.ask_at = ask_at

    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step == self.ask_at:
            run.request_evaluation(agreed=True)

    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        kept = {name: values[name] for name in ("loss", "grad_norm") if name in values}
        self.out.logs.append((run.state.step, kept))

    def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.out.evaluations.append((run.state.step, dict(metrics)))


class Freezes(Callback):
    """Sets `requires_grad` by itself."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def on_fit_start(self, run: Run) -> None:
        freeze(self.program, run)

    def on_step_end(self, run: Run, result: Any) -> None:
        freeze(self.program, run)

    def on_epoch_end(self, run: Run) -> None:
        freeze(self.program, run)


def freeze(p: Program, run: Run) -> None:
    """Freeze the first layer until its time has come."""
    if p.freeze is not None:
        unit, until = p.freeze
        for name, x in run.module.named_parameters():
            if first_layer(p) in name:
                x.requires_grad_(getattr(run.state, unit) >= until)


class Steps(Trainer):
    """What computes its losses in steps of its own."""

    program: Program

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        p, run = self.program, self.run
        assert isinstance(run, Run)
        if p.frozen_by == "step":
            freeze(p, run)
        _, loss = mean_loss(p, run.module if p.past else model, batch)
        weight = weight_of(p, batch)
        if p.loss == "step by weight":
            return StepOutput(loss, torch.tensor(weight))
        if p.loss == "step by number":
            return StepOutput(loss, weight)
        return {"loss": loss} if p.loss == "step as mapping" else loss

    def evaluation_step(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        scores, loss = mean_loss(self.program, model, batch)
        references = batch["labels"] if isinstance(batch, dict) else batch[1]
        found = {"scores": scores, "references": references, "loss": loss}
        if self.program.by_weight:
            found["weight"] = torch.tensor(weight_of(self.program, batch))
        return found


class MakesOptimizer(Trainer):
    """What makes its optimizer by itself."""

    program: Program

    def configure_optimizer(self, model: nn.Module, optimizer: Any) -> Optimizer:
        return make_optimizer(self.program, model.parameters())


class MakesSchedule(Trainer):
    """What makes its schedule by itself."""

    program: Program

    def configure_lr_scheduler(self, optimizer: Optimizer, lr_scheduler: Any) -> Any:
        return _schedule(self.program, optimizer)


def share(predictions: Tensor, references: Tensor) -> float:
    """A metric of one's own, which draws: training must not see that."""
    torch.rand(3)
    counted = references != -100
    return float((predictions[counted] == 1).double().mean())


def _schedule(p: Program, optimizer: Optimizer) -> Any:
    made = make_schedule(p, optimizer, p.epochs if p.unit == "epoch" else planned(p))
    if p.unit == "metric":
        return LRSchedule(made, metric="eval/loss")
    return (
        made
        if p.schedule_as in ("factory", "instance")
        else LRSchedule(made, every="epoch" if p.unit == "epoch" else "step")
    )


def _callbacks(p: Program, out: Outcome) -> list[Callback]:
    found: list[Callback] = [Recorder(out, p.every if p.evaluated == "asked for" else None)]
    metrics: list[Any] = [share if name == "share" else name for name in p.metrics]
    whens: dict[str, dict[str, int]] = {
        "steps": {"every_n_steps": p.every},
        "epochs": {"every_n_epochs": p.every},
        "both": {"every_n_steps": p.every, "every_n_epochs": p.every},
        "asked for": {"every_n_epochs": 1000},
    }
    if p.evaluated in whens:
        found.append(Evaluation(metrics, at_end=p.at_end, **whens[p.evaluated]))
    if p.ema is not None:
        found.append(EMA(p.ema, average_buffers=p.ema_of_buffers))
    if p.freeze is not None and p.frozen_by == "hooks":
        found.append(Freezes(p))
    if p.freeze is not None and p.frozen_by == "FreezeUntil":
        found.append(FreezeUntil(**{p.freeze[0]: {f"*{first_layer(p)}*": p.freeze[1]}}))
    if p.skips_nan:
        found.append(callbacks.NaNGuard("skip"))
    if p.patience is not None:
        found.append(
            EarlyStopping("eval/loss", patience=p.patience, mode="min", min_delta=MIN_DELTA)
        )
    if p.saves:
        found.append(Checkpoint(every_n_steps=p.saves, keep_last=None, background=p.background))
    arguments: dict[str, Any] = {"TimeLimit": {"minutes": 60}}
    others = [getattr(callbacks, name)(**arguments.get(name, {})) for name in p.callbacks]
    return [*found, *others]


def fit(p: Program, folder: Path, resume: Path | str | None = None) -> Outcome:
    """Train a program, or what is left of it, by trainkit."""
    out = Outcome()
    overrides: dict[type[Trainer], bool] = {
        Steps: p.loss in STEPS,
        MakesOptimizer: p.optimizer_as == "override",
        MakesSchedule: p.schedule_as == "override" and p.schedule is not None,
    }
    bases = [kind for kind, wanted in overrides.items() if wanted]
    kind: Any = type("Own", (*bases, Trainer), {"program": p}) if bases else Trainer
    strategy: Any = p.strategy
    if p.model in ("unused head", "unused output") and p.strategy == "ddp":
        strategy = DDP(find_unused_parameters=True)
    precision: Any = p.precision
    if precision == "fp16" and not p.is_exact:
        precision = FP16(init_scale=p.first_scale)
    trainer = kind(
        max_epochs=None if p.max_steps else p.epochs,
        max_steps=p.max_steps,
        strategy=strategy,
        precision=precision,
        gradient_accumulation_steps=p.accumulation,
        max_grad_norm=p.max_grad_norm,
        max_grad_value=p.max_grad_value,
        callbacks=_callbacks(p, out),
        output_dir=folder,
        seed=p.seed,
        log_every_n_steps=p.log_every,
        drop_last_window=p.drop_last_window,
        split_batches=p.split_batches,
        gradient_checkpointing=p.checkpointing,
        limit_train_batches=p.limit,
        limit_eval_batches=p.limit_evaluation,
        overfit_batches=p.overfit,
    )
    model = make_model(p)
    optimizer: Any = partial(make_optimizer, p)
    if p.optimizer_as == "partial" and p.groups == 1:
        optimizer = partial(getattr(torch.optim, p.optimizer), **options_of(p))
    elif p.optimizer_as == "instance":
        optimizer = make_optimizer(p, model.parameters())
    elif p.optimizer_as == "by name":
        of_groups = make_optimizer(p, model.parameters()).param_groups
        optimizer = {
            f"part_{index}": make_optimizer(p, group["params"], lr=group["lr"])
            for index, group in enumerate(of_groups)
        }
    schedule: Any = p.schedule
    if p.schedule is not None and p.schedule not in BY_NAME:
        schedule = partial(_schedule, p)
        if "instance" in p.schedule_as:
            schedule = schedule(optimizer)
    evaluation = None if p.evaluated == "never" else evaluation_loader(p)
    loaders: Any = training_loader(p)
    random_state = torch.get_rng_state()
    trainer.fit(
        model,
        loaders if evaluation is None else (loaders, evaluation),
        optimizer=None if p.optimizer_as == "override" else optimizer,
        lr_scheduler=None if p.schedule_as == "override" else schedule,
        warmup=p.warmup,
        loss_fn=loss_fn(p, model),
        resume=resume,
    )
    assert torch.equal(random_state, torch.get_rng_state()), "the caller's random numbers"
    run = trainer.run
    assert run is not None
    out.weights = {name: whole(value) for name, value in model.state_dict().items()}
    optimizers = [each.optimizer for each in run.optimizers.values()] or [run.optimizer]
    out.state = state_of(run.module, *optimizers)
    out.rates = [float(group["lr"]) for group in run.optimizer.param_groups]
    state = run.state
    out.counters = {
        "step": state.step,
        "skipped": state.skipped_steps,
        "epoch": state.epoch,
        "samples": state.samples_seen,
    }
    for ema in [each for each in trainer.callbacks.callbacks if isinstance(each, EMA)]:
        with ema.applied():
            buffers = [x for x in model.buffers() if x.is_floating_point()]
            averaged = [*run.parameters, *(buffers if p.ema_of_buffers else [])]
            out.average = [whole(x) for x in averaged]
    found = trainer.predict(model, evaluation_loader(p))
    out.predictions = [found["main"] if isinstance(found, dict) else found]
    return out
