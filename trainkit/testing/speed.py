"""A careful loop by hand and `Trainer.fit` on the same work: `python -m trainkit.testing.speed`.

They train a small transformer in turns, in each precision, on the accelerator of this machine, else
on the CPU; printed are the times of a step and their ratio.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from trainkit.basics.device import can_pin, default_kind
from trainkit.errors import ConfigError
from trainkit.trainer import Trainer

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WARM_UP, _STEPS, _ROUNDS = 10, 40, 5
_SKIPS = 8  # steps that fp16 may skip until its scale fits
_TOKENS, _WIDTH, _BATCH, _CLASSES = 256, 512, 16, 10


@dataclass
class Span:
    """The measured steps of a run: from the end of the warm-up to the last update."""

    device: torch.device
    warm_up: int
    steps: int
    updates: int = 0
    stamps: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a step."""
        return (self.stamps[-1] - self.stamps[0]) / self.steps

    @contextmanager
    def watching(self) -> Iterator["Span"]:
        """Watch the updates of all optimizers."""
        hook = register_optimizer_step_post_hook(self.after_update)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield self
            self.warnings = [str(warning.message) for warning in caught]
        finally:
            hook.remove()

    def after_update(self, *_: Any) -> None:
        """Count an update of any optimizer."""
        self.updates += 1
        if self.updates in (self.warm_up, self.warm_up + self.steps):
            wait(self.device)
            self.stamps.append(time.perf_counter())


SpanT = TypeVar("SpanT", bound=Span)


def wait(device: torch.device) -> None:
    """Wait until the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def loss_of(model: nn.Module, batch: Any, loss_fn: Any) -> Tensor:
    """Return the loss of a batch."""
    if loss_fn is None:
        loss: Tensor = model(**batch).loss
    else:
        loss = loss_fn(model(batch[0]), batch[1])
    return loss


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch on the device, without waiting where it is pinned."""
    if isinstance(batch, dict):
        return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    return [value.to(device, non_blocking=True) for value in batch]


@dataclass(frozen=True)
class Task:
    """What both loops train, with which options."""

    device: torch.device
    loader: Callable[..., DataLoader[Any]]  # of keyword arguments for the DataLoader
    make_optimizer: Callable[[Any], Optimizer]
    loss_fn: Any = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: dict[str, Any] | None = None
    max_norm: float | None = 1.0


def by_hand(task: Task, model: nn.Module, *, pinned: bool = True) -> None:
    """Train one epoch as a careful user writes it: pinned memory, no reads of the device."""
    model.to(task.device).train()
    if task.compile is not None:
        model.compile(**task.compile)
    optimizer = task.make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler(task.device.type, enabled=task.precision == "fp16")
    dtype = _DTYPES.get(task.precision)
    autocast = torch.autocast(task.device.type, dtype) if dtype else nullcontext()
    for batch in task.loader(pin_memory=pinned and can_pin(task.device)):
        with autocast:
            loss = loss_of(model, move(batch, task.device), task.loss_fn)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if task.max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def by_trainkit(task: Task, model: nn.Module, **options: Any) -> None:
    """Train the same by `Trainer.fit`."""
    trainer = Trainer(
        max_epochs=1,
        strategy="single",
        precision=task.precision,
        max_grad_norm=task.max_norm,
        compile=task.compile or False,
        **{"callbacks": []} | options,
    )
    trainer.fit(model, task.loader(), optimizer=task.make_optimizer, loss_fn=task.loss_fn)


def run(task: Task, train: Callable[..., None], model: nn.Module, span: SpanT) -> SpanT:
    """Train one epoch, and return what was measured of it."""
    with span.watching():
        train(task, model)
    if len(span.stamps) < 2:
        raise RuntimeError(f"{span.updates} updates were made.")
    return span


class _Reader(nn.Module):
    """A small transformer that tells the class of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, _WIDTH)
        layer = nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, _CLASSES)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return logits


def main(steps: tuple[int, int] = (_WARM_UP, _STEPS), rounds: int = _ROUNDS) -> None:
    """Measure each precision, and print a line for each."""
    device = torch.device(default_kind(), 0)
    samples = (sum(steps) + _SKIPS) * _BATCH
    data = TensorDataset(
        torch.randint(4096, (samples, _TOKENS)), torch.randint(_CLASSES, (samples,))
    )
    loader = partial(DataLoader, data, batch_size=_BATCH)
    adam = partial(AdamW, lr=1e-4, fused=True)
    module: Any = torch.get_device_module(device)
    print(getattr(module, "get_device_name", str)(device))  # torch has none for the CPU
    precisions: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("fp32", "bf16", "fp16")
    for precision in precisions:
        task = Task(device, loader, adam, nn.CrossEntropyLoss(), precision)
        loops: tuple[Callable[..., None], ...] = (by_hand, by_trainkit)
        models = [_Reader(), _Reader()]
        times: list[tuple[float, ...]] = []
        try:
            for _ in range(rounds + 1):
                runs = zip(loops, models, [Span(device, *steps) for _ in loops], strict=True)
                times.append(tuple(run(task, *each).seconds for each in runs))
        except ConfigError as error:
            print(f"{precision}: not tried: {error}")
            continue
        ratios = [ours / hand for hand, ours in times[1:]]  # the first round is warm-up
        hand, ours = (1e3 * statistics.median(each) for each in zip(*times[1:], strict=True))
        print(
            f"{precision}: {hand:.2f} ms a step by hand, {ours:.2f} ms by trainkit, ratio "
            f"{statistics.median(ratios):.3f} (in {rounds} rounds {min(ratios):.3f} to "
            f"{max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
