"""Evaluation and prediction: every sample once, whatever the number of processes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainkit import rng
from trainkit.accelerator import Accelerator
from trainkit.callback import Callback, CallbackList
from trainkit.data import BatchInfo, PreparedLoader
from trainkit.distributed import concatenate, gather_samples
from trainkit.errors import DataError
from trainkit.logs import LogSums
from trainkit.metrics import Metric
from trainkit.precision import Precision
from trainkit.run import Run
from trainkit.types import Batch, Scalars

__all__ = ["evaluate", "evaluate_run", "predict"]

EvaluationStep = Callable[[nn.Module, Batch], Mapping[str, Any]]

GATHER_EVERY = 16
"""Batches that are gathered in one collective; the same on all processes."""


def evaluate_run(run: Run, callbacks: CallbackList) -> None:
    """Evaluate the model of a run on all its loaders, between the evaluation hooks."""
    phase, run.phase = run.phase, "evaluate"
    callbacks.emit(Callback.on_evaluation_start, run)
    metrics: Scalars = {}
    for name, loader in run.evaluation_loaders.items():
        metrics |= evaluate(
            run.module,
            loader,
            accelerator=run.accelerator,
            precision=run.precision,
            step=run.evaluation_step,
            metrics=run.evaluation_metrics,
            prefix=f"eval/{name}/" if name else "eval/",
            after_batch=lambda: callbacks.emit(Callback.on_evaluation_batch_end, run),
        )
    run.requests.evaluation = False
    run.last_evaluated_attempt = run.state.attempts
    run.metrics = metrics
    _keep_best(run.best_metrics, metrics)
    if run.lr_schedule is not None:
        run.lr_schedule.advance_evaluation(metrics)
    callbacks.emit(Callback.on_evaluation_end, run, metrics)
    run.phase = phase


def evaluate(
    module: nn.Module,
    loader: PreparedLoader,
    *,
    accelerator: Accelerator,
    precision: Precision,
    step: EvaluationStep,
    metrics: list[Metric],
    prefix: str = "eval/",
    after_batch: Callable[[], None] | None = None,
) -> Scalars:
    """Return the figures of `module` on `loader`, equal on all processes.

    No training state changes: random streams, the mode of every submodule and the gradient mode
    are put back, also after an error (DESIGN 2.21).

    Args:
        module: The user's own module, on its device.
        loader: A prepared evaluation loader.
        accelerator: Gathers over the processes.
        precision: Whose autocast the step runs in.
        step: Returns a mapping. `predictions` and `references` hold one entry for each sample.
            Every other entry is averaged: a scalar counts `weight` times (default: the number of
            samples), a tensor with one number for each sample counts each once.
        metrics: Computed from all predictions and references, or from the mean loss.
        prefix: Stands before each name in the result.
        after_batch: Called after each batch on every process.
    """
    for metric in metrics:
        metric.reset()
    sums = LogSums()
    chunks = _Chunks(accelerator, loader, metrics)
    with _undisturbed(module, accelerator.device):
        for micro_batch in loader.batches(0):
            with precision.autocast():
                outputs = _mapping(step(module, micro_batch.data))
            chunks.add(outputs)
            if micro_batch.count:
                _add_means(sums, outputs, micro_batch.count)
            if after_batch is not None:
                after_batch()
        chunks.flush()
    figures = sums.reduce(accelerator.processes)
    weight = figures.pop(_LOSS_WEIGHT, 0.0)
    return {
        f"{prefix}{name}": value for name, value in _all_figures(metrics, figures, weight).items()
    }


def predict(
    module: nn.Module,
    loader: PreparedLoader,
    *,
    accelerator: Accelerator,
    precision: Precision,
    step: EvaluationStep,
) -> Any:
    """Return the `predictions` of every sample once, in the loader's order, on all processes."""
    parts: list[tuple[Any, int]] = []
    chunks = _Chunks(accelerator, loader, [])
    with _undisturbed(module, accelerator.device):
        for micro_batch in loader.batches(0):
            with precision.autocast():
                outputs = _mapping(step(module, micro_batch.data))
            parts += chunks.add({"predictions": _require(outputs, "predictions")}, keep=True)
        parts += chunks.flush()
    return concatenate(
        [part["predictions"] for part, _ in parts], [samples for _, samples in parts]
    )


_LOSS_WEIGHT = "\0loss weight"
_NOT_AVERAGED = ("predictions", "references", "weight")


@dataclass(slots=True)
class _Chunks:
    """Outputs of consecutive batches, gathered together to spare collectives."""

    accelerator: Accelerator
    loader: PreparedLoader
    metrics: list[Metric]
    outputs: list[dict[str, Any]] = field(default_factory=list)
    infos: list[BatchInfo] = field(default_factory=list)

    def add(self, outputs: Mapping[str, Any], *, keep: bool = False) -> list[tuple[Any, int]]:
        """Take in the outputs of one batch; return what `flush` does, if it was time to."""
        wanted = [metric for metric in self.metrics if metric.uses == "predictions"]
        if not wanted and not keep:
            return []
        names = ["predictions"] if keep else ["predictions", "references"]
        self.outputs.append({name: _require(outputs, name) for name in names})
        info = self.accelerator.loaders.current(self.loader)
        assert info is not None  # the loader has just yielded
        self.infos.append(info)
        return self.flush() if len(self.outputs) == GATHER_EVERY else []

    def flush(self) -> list[tuple[Any, int]]:
        """Gather what is held, feed the metrics, and return it with its number of samples."""
        if not self.outputs:
            return []
        gathered = gather_samples(
            self.accelerator.processes,
            self.outputs,
            [info.counts for info in self.infos],
            [info.local_size for info in self.infos],
        )
        for metric in self.metrics:
            if metric.uses == "predictions":
                metric.update(gathered["predictions"], gathered["references"])
        samples = sum(sum(info.counts) for info in self.infos)
        self.outputs, self.infos = [], []
        return [(gathered, samples)]


@contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        with rng.preserved(device), torch.no_grad():
            module.eval()
            yield
    finally:
        for part, training in modes:
            part.training = training


def _mapping(outputs: object) -> Mapping[str, Any]:
    if isinstance(outputs, Mapping):
        return outputs
    raise DataError(
        f"`evaluation_step` must return a mapping, but returned {type(outputs).__name__!r}. "
        'Return for example `{"loss": loss, "predictions": ..., "references": ...}`.'
    )


def _require(outputs: Mapping[str, Any], name: str) -> Any:
    if name in outputs:
        return outputs[name]
    raise DataError(
        f"`evaluation_step` returned no `{name}`, only {sorted(map(str, outputs))}, but a metric "
        "or `predict` needs it. Return it with one entry for each sample."
    )


def _add_means(sums: LogSums, outputs: Mapping[str, Any], count: int) -> None:
    weight = outputs.get("weight", count)
    for name, value in outputs.items():
        if name in _NOT_AVERAGED:
            continue
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            sums.add(name, value, weight)
        elif isinstance(value, Tensor) and value.shape == (count,):
            sums.add(name, value.double().mean(), count)
        else:
            raise DataError(
                f"`evaluation_step` returned `{name}` as {_shape(value)}, but the batch has "
                f"{count} samples. Return a scalar mean (with `weight`), or a tensor with one "
                "number for each sample."
            )
    if "loss" in outputs:
        sums.add(_LOSS_WEIGHT, weight if isinstance(weight, Tensor) else float(weight), 1, "sum")


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _all_figures(metrics: list[Metric], means: Scalars, loss_weight: float) -> Scalars:
    figures = dict(means)
    for metric in metrics:
        if metric.uses == "loss":
            if "loss" not in means:
                raise DataError(
                    f"The metric `{metric.name}` is computed from the loss, but "
                    "`evaluation_step` returned none. Pass `loss_fn`, or return `loss`."
                )
            metric.update([means["loss"]], [loss_weight])
        for name, value in metric.compute().items():
            if name in figures:
                raise DataError(
                    f"Two figures of an evaluation are called `{name}`. Rename the one that "
                    f"`{metric.name}` gives, or leave one out."
                )
            figures[name] = value
    return figures


def _keep_best(best: Scalars, metrics: Scalars) -> None:
    for name, value in metrics.items():
        lower = name.rsplit("/", 1)[-1].endswith(("loss", "error", "mse", "mae", "perplexity"))
        known = best.get(name)
        if value == value and (known is None or (value < known if lower else value > known)):
            best[name] = value
