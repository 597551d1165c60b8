"""One class: a window of micro-batches through `Trainer.fit`, against one backward over all."""

import signal
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PretrainedConfig, PreTrainedModel
from typing_extensions import override

from benchmarks.model_losses.batches import SIZES, Samples, collate, widths
from benchmarks.model_losses.small import configs, make
from trainkit import Callback, Run, Trainer
from trainkit.errors import ConfigError

SECONDS = 60  # of a processor, for one class
FINAL = (ImportError, NotImplementedError, ConfigError, TimeoutError)  # no other size helps
LIMIT = 1e-4
"""Largest relative distance from the whole: losses are mostly fp32, also of models in fp64."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found of a class.

    Attributes:
        name: Of the class.
        gradient: How far that of the window is from that of the whole, relative; None where the
            class was not trained.
        evaluation: The same of `eval/loss`.
        said: What trainkit printed before the first step, or why the class was not trained.
    """

    name: str
    gradient: float | None = None
    evaluation: float = 0.0
    said: str = ""

    @property
    def is_exact(self) -> bool:
        return self.gradient is not None and max(self.gradient, self.evaluation) <= LIMIT


class Window(Callback):
    """Keeps the gradients of the step."""

    gradients: Tensor

    @override
    def on_gradients(self, run: Run) -> None:
        self.gradients = gradients_of(run.module)


def gradients_of(model: nn.Module) -> Tensor:
    """Return all gradients as one vector."""
    found = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    return torch.cat([gradient.flatten().double() for gradient in found])


def measure(kind: type[PreTrainedModel], **changes: Any) -> Found:
    """Try a class in the first configuration that can be trained, with changes to its settings."""
    name = ", ".join([kind.__name__, *(f"{key}={value}" for key, value in changes.items())])
    failure: Exception | None = None
    signal.signal(signal.SIGPROF, _too_slow)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        for config, dtype in product(configs(kind), (torch.float64, torch.float32)):
            vars(config).update(changes)
            try:
                return _of_config(name, kind, config, dtype)
            except FINAL:
                raise
            except Exception as error:
                failure = failure or error
    except Exception as error:
        failure = error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Found(name=name, said=f"{type(failure).__name__}: {failure}")


def _of_config(
    name: str, kind: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype
) -> Found:
    """Measure a model.

    Where filling a batch up to its longest sample changes what the model says of the others, no
    weight can make up for it: then all micro-batches are filled up to one length.
    """
    model = make(kind, config)
    nn.Module.to(model, dtype)
    drawn = Samples(kind, config)
    samples = [_cast(drawn.draw(number), dtype) for number in range(sum(SIZES))]
    found = _compare(name, model, samples, None)
    return found if found.is_exact else _compare(name, model, samples, widths(samples))


def _compare(
    name: str, model: PreTrainedModel, samples: list[Any], lengths: Mapping[str, int] | None
) -> Found:
    def loss() -> Any:
        return getattr(model(**collate(samples, lengths)), "loss", None)

    model.train(False)
    with torch.no_grad():
        expected = loss()
    if expected is None:
        raise NotImplementedError("no loss")
    model.train()
    model.zero_grad()
    losses = loss(), loss()
    if not torch.allclose(*losses, rtol=LIMIT, equal_nan=True):
        raise NotImplementedError("it draws random numbers")
    losses[0].sum().backward()
    whole = gradients_of(model)
    if not torch.isfinite(whole).all():
        raise ArithmeticError("its gradient is not finite")
    model.zero_grad()
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    batches = [range(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    loader: Any = DataLoader(
        samples,  # type: ignore[arg-type]
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=lambda rows: collate(rows, lengths),
    )
    window, said = Window(), StringIO()
    trainer = Trainer(
        max_epochs=1, gradient_accumulation_steps=len(SIZES), callbacks=[window], strategy="single"
    )
    with redirect_stdout(said), redirect_stderr(said):
        trainer.fit(model, loader, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        evaluated = trainer.evaluate(model, loader)["eval/loss"]
    return Found(
        name=name,
        gradient=float((window.gradients - whole).norm() / whole.norm()),
        evaluation=abs(evaluated - float(expected)) / abs(float(expected)),
        said=said.getvalue(),
    )


def _cast(sample: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: _cast(value, dtype)
        if isinstance(value, dict)
        else value.to(dtype)
        if value.is_floating_point()
        else value
        for name, value in sample.items()
    }


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"it takes more than {SECONDS} s")
