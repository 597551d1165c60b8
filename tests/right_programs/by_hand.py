"""The loop by hand: plain torch, all processes one after the other in this one."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from tests.right_programs.data import Part, evaluation_batches, windows
from tests.right_programs.losses import mean_loss, weight_of
from tests.right_programs.models import make_model
from tests.right_programs.optimizers import make_optimizer
from tests.right_programs.program import BY_NAME, Program
from tests.right_programs.schedules import make_by_name, make_schedule
from trainkit.basics import rng

__all__ = ["Outcome", "planned", "train"]

MIN_DELTA = 0.01  # of early stopping
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Outcome:
    """What a training came to."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)  # of the optimizer
    average: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    logs: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)


def planned(p: Program) -> int:
    """Return the updates of a program that skips none."""
    epochs = range(p.epochs)
    return p.max_steps or sum(len(windows(p, epoch)) for epoch in epochs)


def train(p: Program, moved: float = 0.0) -> Outcome:
    """Train a program by hand.

    Args:
        p: The program.
        moved: By how much of its size each of the first weights is moved, up or down.
    """
    loop = _Loop(p)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in loop.model.parameters() if moved else []:
            x.mul_(1 + moved * (2 * torch.randint(2, x.shape, generator=chance).double() - 1))
    return loop.train()


class _Loop:
    def __init__(self, program: Program) -> None:
        self.p = p = program
        self.model = make_model(p)
        self.optimizer = make_optimizer(p, self.model.parameters())
        self.held = [x for group in self.optimizer.param_groups for x in group["params"]]
        self.schedule: Any = None
        if p.schedule in BY_NAME:
            self.schedule = make_by_name(p, self.optimizer, planned(p))
        elif p.schedule is not None:
            advances = p.epochs if p.unit == "epoch" else planned(p)
            self.schedule = make_schedule(p, self.optimizer, advances)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=p.first_scale, enabled=p.precision == "fp16"
        )
        seeds = [rng.device_seed(p.seed, rank) for rank in range(p.processes)]
        self.streams = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
        self.average = [x.detach().clone() for x in self._averaged()]
        self.step = self.epoch = self.skipped = self.samples = self.averaged = 0
        self.open: list[tuple[float, float, float]] = []  # loss, weight, norm of each step
        self.evaluated = -1  # the attempt
        self.best, self.bad, self.stopped = math.inf, 0, False
        self.out = Outcome()

    def train(self) -> Outcome:
        p, out = self.p, self.out
        self._freeze()
        while not self.stopped and (p.max_steps or self.epoch < p.epochs):
            self._train_epoch()
        at_end = p.evaluated == "by default" or (p.evaluated != "never" and p.at_end)
        if at_end and self.evaluated != self.step + self.skipped:
            self._evaluate()
        self._log()
        out.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        out.state = state_of(self.model, self.optimizer)
        out.average = self.average
        out.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        names = ("step", "skipped", "epoch", "samples")
        out.counters = {name: getattr(self, name) for name in names}
        out.predictions = self._measure(limited=False)[1]
        return out

    def _train_epoch(self) -> None:
        p = self.p
        left = windows(p, self.epoch)
        while left and not self.stopped:
            due = self._train_window(left.pop(0))
            if not left:
                self.epoch += 1
                if self.schedule is not None and p.unit == "epoch":
                    self.schedule.step()
                self._freeze()
                due |= p.evaluated == "by default"
                due |= p.evaluated in ("epochs", "both") and self.epoch % p.every == 0
            self.stopped |= self.step == p.max_steps
            self.stopped |= p.max_steps is None and self.epoch == p.epochs
            if self.step and (self.step % p.log_every == 0 or self.stopped):
                self._log()
            if due:
                self._evaluate()
                self._decide()

    def _train_window(self, window: list[list[Part]]) -> bool:
        """Train on a window; return whether an evaluation is due."""
        p = self.p
        loss, weight = self._gradients(window)
        self.samples += sum(part[0] for batch in window for part in batch if part is not None)
        self.scaler.unscale_(self.optimizer) if p.precision == "fp16" else None
        gradients = [x.grad for x in self.held if x.grad is not None]
        overflowed = p.precision == "fp16" and not all(map(_is_finite, gradients))
        if overflowed or (p.skips_nan and not all(map(_is_finite, gradients))):
            self.skipped += 1
            self.scaler.update() if p.precision == "fp16" else None
            self.optimizer.zero_grad()
            return False
        norm = self._clip()
        if p.optimizer == "LBFGS":
            self._step_by_closure(window, loss)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        if self.schedule is not None and p.unit == "step":
            self.schedule.step()
        self.step += 1
        self.open.append((loss, weight, norm))
        self._average()
        self._freeze()
        steps = p.evaluated in ("steps", "both") and self.step % p.every == 0
        return steps or (p.evaluated == "asked for" and self.step == p.every)

    def _clip(self) -> float:
        """Clip the gradients; return their norm before."""
        p, norm = self.p, math.nan
        of_sparse = [x.grad.coalesce().values() for x in self.held if _is_sparse(x.grad)]
        if p.max_grad_norm is not None and of_sparse:
            others = [x.grad for x in self.held if x.grad is not None and not x.grad.is_sparse]
            norm = math.hypot(*(float(x.norm()) for x in (*of_sparse, *others)))
            for x in self.held:
                x.grad = x.grad * min(1.0, p.max_grad_norm / (norm + 1e-6))
        elif p.max_grad_norm is not None:
            norm = clip_grad_norm_(self.held, p.max_grad_norm).item()
        if p.max_grad_value is not None:
            clip_grad_value_(self.held, p.max_grad_value)
        return norm

    def _step_by_closure(self, window: list[list[Part]], loss: float) -> None:
        losses = [loss]  # which the first call finds

        def closure() -> float:
            if not losses:
                self.optimizer.zero_grad()
                losses.append(self._gradients(window)[0])
                self._clip()
            return losses.pop()

        self.optimizer.step(closure)

    def _gradients(self, window: list[list[Part]]) -> tuple[float, float]:
        """Leave the gradient of the mean over a window; return the mean, and what it counts."""
        p, count = self.p, self.p.processes
        weights = [[weight_of(p, part[1]) if part else 0.0 for part in batch] for batch in window]
        total, sum_of_losses = sum(map(sum, weights)), 0.0
        buffers = _copies(self.model)
        of_main, own = buffers, list[list[Tensor | None]]()
        for rank in range(count):
            for name, value in buffers.items():
                self.model.get_buffer(name).copy_(value)
            for batch, weight in zip(window, weights, strict=True):
                if (part := batch[rank]) is None:
                    continue
                scores, loss = self._forward(rank, part[1])
                if not weight[rank]:  # a mean over nothing has no gradient
                    # Not in fp16, in which the first scale of a GradScaler is infinite.
                    sums = [
                        x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
                        for x in _listed(scores)
                    ]
                    loss = torch.stack(sums).sum() * 0
                factor = weight[rank] * count / total if total else 0.0
                scaled: Any = self.scaler.scale(loss if factor == 1 else loss * factor)
                scaled.backward()
                sum_of_losses += float(loss.detach()) * weight[rank]
            of_main = of_main if rank else _copies(self.model)
            own.append([x.grad for x in self.model.parameters()])
            self.model.zero_grad()
        for name, value in of_main.items():
            self.model.get_buffer(name).copy_(value)
        for x, gradients in zip(self.model.parameters(), zip(*own, strict=True), strict=True):
            given = [gradient / count for gradient in gradients if gradient is not None]
            x.grad = sum(given[1:], given[0]) if given else None
        return sum_of_losses / total if total else math.nan, total

    def _forward(self, rank: int, batch: Any) -> tuple[Any, Tensor]:
        """Return scores and mean of a micro-batch, with the random numbers of a process."""
        torch.set_rng_state(self.streams[rank])
        self.model.train()
        with self._autocast():
            found = mean_loss(self.p, self.model, batch)
        self.streams[rank] = torch.get_rng_state()
        return found

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = DTYPES.get(self.p.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _freeze(self) -> None:
        """Freeze the first layer until its time has come."""
        if self.p.freeze is not None:
            unit, until = self.p.freeze
            thawed = (self.step if unit == "step" else self.epoch) >= until
            for name, x in self.model.named_parameters():
                if first_layer(self.p) in name:
                    x.requires_grad_(thawed)

    def _averaged(self) -> list[Tensor]:
        buffers = [x for x in self.model.buffers() if x.is_floating_point()]
        return [*self.held, *(buffers if self.p.ema_of_buffers else [])]

    @torch.no_grad()
    def _average(self) -> None:
        if self.p.ema is not None:
            decay = min(self.p.ema, (1 + self.averaged) / (10 + self.averaged))
            for average, value in zip(self.average, self._averaged(), strict=True):
                average.lerp_(value, 1 - decay)
            self.averaged += 1

    def _log(self) -> None:
        steps, self.open = self.open, []
        if steps:
            weight = sum(w for _, w, _ in steps)
            values = {"loss": sum(x * w for x, w, _ in steps if w) / weight if weight else math.nan}
            if self.p.max_grad_norm is not None:
                values["grad_norm"] = sum(norm for *_, norm in steps) / len(steps)
            self.out.logs.append((self.step, values))

    def _evaluate(self) -> None:
        """Evaluate the average, or else the model."""
        own = [x.detach().clone() for x in self._averaged()]
        self._put(own if self.p.ema is None else self.average)
        found, _ = self._measure(limited=True)
        self._put(own)
        self.evaluated = self.step + self.skipped
        self.out.evaluations.append((self.step, found))

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for x, value in zip(self._averaged(), values, strict=True):
            x.copy_(value)

    def _decide(self) -> None:
        """Do what follows from an evaluation that was planned."""
        value = self.out.evaluations[-1][1]["eval/loss"]
        if self.p.unit == "metric":
            self.schedule.step(value)
        if self.p.patience is not None:
            better = self.best - value > MIN_DELTA
            self.best, self.bad = (value, 0) if better else (self.best, self.bad + 1)
            self.stopped |= self.bad >= self.p.patience

    @torch.no_grad()
    def _measure(self, *, limited: bool) -> tuple[dict[str, float], list[Tensor]]:
        """Return the metrics of the model, and the scores of all samples."""
        p, model, sums, right, ones, labels = self.p, self.model, [0.0, 0.0], 0, 0, 0
        parts = []
        model.eval()
        for batch in evaluation_batches(p, limited=limited):
            with self._autocast():
                scores, loss = mean_loss(p, model, batch)
            weight = weight_of(p, batch)
            sums = [sums[0] + float(loss) * weight if weight else sums[0], sums[1] + weight]
            references = batch["labels"] if isinstance(batch, dict) else batch[1]
            classes = scores.argmax(-1)
            parts.append(scores)
            if {"accuracy", "share"} & {*p.metrics}:
                right += int((classes == references).sum())
                ones += int((classes == 1)[references != -100].sum())
                labels += int((references != -100).sum())
        values = {"eval/loss": sums[0] / sums[1] if sums[1] else math.nan}
        if "accuracy" in p.metrics:
            values["eval/accuracy"] = right / labels
        if "share" in p.metrics:
            values["eval/share"] = ones / labels
        if "perplexity" in p.metrics:
            loss = torch.tensor(values["eval/loss"], dtype=torch.float64)
            values["eval/perplexity"] = loss.exp().item()  # infinite where that is too large
        return values, parts


def state_of(model: nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Return what optimizers keep, by parameter and key."""
    names = {id(x): name for name, x in model.named_parameters()}
    found = {}
    for optimizer in optimizers:
        for x, state in optimizer.state.items():
            for key, value in state.items():
                values = value if isinstance(value, list) else [value]
                for index, one in enumerate(values):
                    if isinstance(one, Tensor | float | int):
                        found[f"{names[id(x)]}.{key}.{index}"] = whole(torch.as_tensor(one))
    return found


def whole(value: Tensor) -> Tensor:
    """Return a copy of a tensor, also of one whose parts lie on several processes."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def first_layer(p: Program) -> str:
    """Return the name of the layer that is frozen at first."""
    return "embed" if p.model == "attention" else "0."


def _is_sparse(x: Tensor | None) -> bool:
    return x is not None and x.is_sparse


def _is_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x.coalesce().values() if x.is_sparse else x).all())


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers()}


def _listed(scores: Any) -> list[Tensor]:
    return [*scores.values()] if isinstance(scores, dict) else [scores]
