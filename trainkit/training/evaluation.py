"""Evaluation and prediction: every sample once, whatever the number of processes."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit import rng
from trainkit.data import BatchInfo, MicroBatch, PreparedLoader
from trainkit.distributed import concatenate, gather_samples
from trainkit.distributed.communicator import Communicator
from trainkit.errors import DataError, TrainkitError
from trainkit.metrics.metric import Metric
from trainkit.precision import Precision
from trainkit.training.callback import Callback, CallbackList
from trainkit.training.logging import Log, LogSums
from trainkit.training.run import Run
from trainkit.types import Batch, LossFn, Scalars

if TYPE_CHECKING:
    from trainkit.metrics.model_outputs import Reading

__all__ = ["evaluate", "evaluate_run", "predict"]

EvaluationStep = Callable[[nn.Module, Batch], Mapping[str, Any]]

GATHER_EVERY = 16
"""Batches that are gathered in one collective; the same on all processes."""


def evaluate_run(run: Run, callbacks: CallbackList) -> None:
    """Evaluate the model of a run on all its loaders, between the evaluation hooks."""
    with run.weights.held(error_is_last=True):
        _evaluate_run(run, callbacks)


def _evaluate_run(run: Run, callbacks: CallbackList) -> None:
    phase, run.phase = run.phase, "evaluate"
    run.strategy.share_buffers(run.module)
    callbacks.emit(Callback.on_evaluation_start, run)
    metrics: Scalars = {}
    for name, loader in run.evaluation_loaders.items():
        metrics |= evaluate(
            run.module,
            loader,
            log=run,
            communicator=run.processes,
            precision=run.precision,
            step=run.evaluation_step,
            loss_fn=run.loss_fn,
            metrics=run.evaluation_metrics,
            prefix=f"eval/{name}/" if name else "eval/",
            watch=partial(_announce, run, callbacks),
        )
    # One that comes only because the run stops is not part of the plan that a resume goes on with.
    run.evaluation_is_planned, run.requests.evaluation = run.requests.evaluation, False
    run.last_evaluated_attempt = run.state.attempts
    run.metrics = metrics
    _keep_best(run, metrics)
    if run.lr_schedule is not None and run.evaluation_is_planned:
        run.lr_schedule.advance_evaluation(metrics)
    callbacks.emit(Callback.on_evaluation_end, run, metrics)
    run.phase = phase


def _announce(
    run: Run, callbacks: CallbackList, batches: Iterator[MicroBatch]
) -> Iterator[MicroBatch]:
    for micro_batch in batches:
        yield micro_batch
        callbacks.emit(Callback.on_evaluation_batch_end, run)


def rehearse(run: Run) -> set[str] | None:
    """Evaluate one batch of each loader and forget it; return the names of the figures.

    So what cannot work, such as metrics that do not fit the outputs, is said before the first
    step. The names are None where they are not known: a metric of others may refuse so little
    data, and a loader that can be read only once is left alone.
    """
    from trainkit.training.unchanged import kept  # only a fit needs it

    metrics = [_Rehearsed(metric) for metric in run.evaluation_metrics]
    names: set[str] = set()
    owner = getattr(run.evaluation_step, "__self__", None)  # the trainer
    for name, loader in run.evaluation_loaders.items():
        data = getattr(loader.source, "dataset", None)
        if isinstance(loader.source, Iterator) or isinstance(data, Iterator):
            return None
        with (
            kept(run.module, owner, *run.evaluation_metrics),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # about so little data
            names |= evaluate(
                run.module,
                loader,
                log=run,
                communicator=run.processes,
                precision=run.precision,
                step=run.evaluation_step,
                loss_fn=run.loss_fn,
                metrics=[*metrics],
                prefix=f"eval/{name}/" if name else "eval/",
                watch=lambda batches: islice(batches, 1),
            ).keys()
    return None if any(metric.refused for metric in metrics) else names


class _Rehearsed(Metric):
    """A metric that may refuse to compute, unless it is our own error that says why.

    Attributes:
        refused: Whether the names of its figures remain unknown.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.name = metric.name
        self.uses = metric.uses
        self.refused = False

    @override
    def reset(self) -> None:
        self.metric.reset()

    @override
    def update(self, predictions: Any, references: Any) -> None:
        self.metric.convention = self.convention
        self.metric.update(predictions, references)

    @override
    def compute(self) -> dict[str, float]:
        try:
            figures = self.metric.compute()
        except TrainkitError:
            raise
        except Exception:
            self.refused = True
            return {}
        # Figures for each class are those of the classes in this one batch.
        self.refused |= self.metric.keys is None and any("/" in name for name in figures)
        return figures


def evaluate(  # noqa: PLR0913  the parts of a run, and it may be of none
    module: nn.Module,
    loader: PreparedLoader,
    *,
    log: Log,
    communicator: Communicator,
    precision: Precision,
    step: EvaluationStep,
    loss_fn: LossFn | None,
    metrics: list[Metric],
    prefix: str = "eval/",
    watch: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] = iter,
) -> Scalars:
    """Return the figures of `module` on `loader`, equal on all processes.

    No training state changes: random streams, the mode of every submodule and the gradient mode
    are put back, also after an error (rule 21).

    Args:
        module: The user's own module, on its device.
        loader: A prepared evaluation loader.
        log: What `step` may log to: between the batches its figures are averaged like those that
            `step` returns.
        communicator: Gathers over the processes.
        precision: Whose autocast the step runs in.
        step: Returns a mapping. `scores`, `predictions`, `probabilities` and `references` hold
            one entry for each sample. Every other entry is averaged: a scalar counts `weight`
            times (default: the number of samples), a tensor with one number for each sample
            counts each once.
        loss_fn: Says how `scores` are read, where a metric uses what the step does not return.
        metrics: Computed from all predictions and references, or from the mean loss.
        prefix: Stands before each name in the result.
        watch: Stands between the loader's batches and the evaluation.
    """
    for metric in metrics:
        metric.reset()
    sums = LogSums()
    # What a step of the user's own returns as scores may be probabilities.
    is_default = getattr(step, "__module__", "").startswith("trainkit.")
    chunks = _Chunks(communicator, loader, metrics, _reading(module, loss_fn), is_default)
    with _undisturbed(module, communicator), log.apart() as logged:
        with closing(loader.batches(0)) as batches:
            for micro_batch in watch(batches):
                log.samples, log.zero_weight = micro_batch.count, micro_batch.count == 0
                communicator.processes.repeats = micro_batch.count == 0
                with precision.autocast():
                    outputs = _mapping(step(module, micro_batch.data))
                communicator.processes.repeats = False
                chunks.add(outputs)
                if micro_batch.count:
                    _add_means(sums, outputs, micro_batch.count)
            chunks.flush()
        sums.join(logged)
        means = sums.reduce(communicator.processes)
        weight = means.pop(_LOSS_WEIGHT, 1.0)
        figures = _all_figures(metrics, means, weight)
    return {f"{prefix}{name}": value for name, value in figures.items()}


def predict(
    module: nn.Module,
    loader: PreparedLoader,
    *,
    log: Log,
    communicator: Communicator,
    precision: Precision,
    step: EvaluationStep,
    loss_fn: LossFn | None,
    outputs: str,
) -> Any:
    """Return what was asked for of every sample once, in the loader's order, on all processes.

    What `step` logs is dropped.
    """
    parts: list[tuple[Any, int]] = []
    reading = _reading(module, loss_fn)
    reading.check(outputs)
    chunks = _Chunks(communicator, loader, [], reading)
    with (
        _undisturbed(module, communicator),
        log.apart(),
        closing(loader.batches(0)) as batches,
    ):
        for micro_batch in batches:
            log.samples, log.zero_weight = micro_batch.count, micro_batch.count == 0
            communicator.processes.repeats = micro_batch.count == 0
            with precision.autocast():
                returned = _mapping(step(module, micro_batch.data))
            communicator.processes.repeats = False
            parts += chunks.hold({outputs: reading.predicted(returned, outputs)})
        parts += chunks.flush()
    return concatenate([part[outputs] for part, _ in parts], [samples for _, samples in parts])


def _reading(module: nn.Module, loss_fn: LossFn | None) -> "Reading":
    from trainkit.metrics.model_outputs import Reading  # runs without an evaluation need none of it

    return Reading(module, loss_fn)


_LOSS_WEIGHT = "\0loss weight"
_NOT_AVERAGED = ("scores", "predictions", "probabilities", "references", "weight")


@dataclass(slots=True)
class _Chunks:
    """Outputs of consecutive batches, gathered together to spare collectives."""

    communicator: Communicator
    loader: PreparedLoader
    metrics: list[Metric]
    reading: "Reading"
    knows_scores: bool = False  # whether they are what the model returned
    wanted: list[str] = field(init=False)  # what the metrics use, besides the references
    keys: dict[str, str] = field(default_factory=dict)  # under which of the outputs that is
    outputs: list[dict[str, Any]] = field(default_factory=list)
    infos: list[BatchInfo] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.metrics = [metric for metric in self.metrics if metric.uses != "loss"]
        self.wanted = sorted({metric.uses for metric in self.metrics})

    def add(self, outputs: Mapping[str, Any]) -> None:
        """Take in the outputs of one batch for the metrics."""
        if not self.wanted:
            return
        entries = {"references": self.reading.require(outputs, "references")}
        for uses in self.wanted:
            key, entry = self.reading.entry(outputs, uses)
            entries[key], self.keys[uses] = entry, key
        self.hold(entries)

    def hold(self, entries: dict[str, Any]) -> list[tuple[Any, int]]:
        """Keep what is to be gathered of one batch; return what `flush` does, if it was time."""
        self.outputs.append(entries)
        info = self.communicator.loaders.current(self.loader)
        assert info is not None  # the loader has just yielded
        self.infos.append(info)
        return self.flush() if len(self.outputs) == GATHER_EVERY else []

    def flush(self) -> list[tuple[Any, int]]:
        """Gather what is held, feed the metrics, and return it with its number of samples."""
        if not self.outputs:
            return []
        gathered = gather_samples(
            self.communicator.processes,
            self.outputs,
            [info.counts for info in self.infos],
            [info.local_size for info in self.infos],
        )
        scores = gathered.get("scores") if self.knows_scores else None
        known = self.reading.known(scores) if isinstance(scores, Tensor) else None
        for metric in self.metrics:
            metric.convention = known
            metric.update(gathered[self.keys[metric.uses]], gathered["references"])
        samples = sum(sum(info.counts) for info in self.infos)
        self.outputs, self.infos = [], []
        return [(gathered, samples)]


@contextmanager
def _undisturbed(module: nn.Module, communicator: Communicator) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    repeats, communicator.processes.repeats = communicator.processes.repeats, False
    try:
        with rng.preserved(communicator.device), communicator.loaders.apart(), torch.no_grad():
            module.eval()
            yield
    finally:
        communicator.processes.repeats = repeats
        torch.clear_autocast_cache()  # else a forward around it takes casts that have no gradient
        for part, training in modes:
            part.training = training


def _mapping(outputs: object) -> Mapping[str, Any]:
    if isinstance(outputs, Mapping):
        return outputs
    raise DataError(
        f"`evaluation_step` must return a mapping, but returned {type(outputs).__name__!r}. "
        'Return for example `{"loss": loss, "predictions": ..., "references": ...}`.'
    )


def _add_means(sums: LogSums, outputs: Mapping[str, Any], count: int) -> None:
    weight = outputs.get("weight")
    weight = count if weight is None else weight
    for name, value in outputs.items():
        if name in _NOT_AVERAGED:
            continue
        if isinstance(value, Tensor) and value.shape == (count,) and name != "loss":
            sums.add(name, value.double().mean(), count)
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            sums.add(name, value, weight)
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
        computed = metric.compute()
        metric.latest_keys = tuple(computed)
        for name, value in computed.items():
            if name in figures:
                raise DataError(
                    f"Two figures of an evaluation are called `{name}`. Rename the one that "
                    f"`{metric.name}` gives, or leave one out."
                )
            figures[name] = value
    return figures


def _keep_best(run: Run, metrics: Scalars) -> None:
    """Note the best value of the figures of which it is known what is better."""
    higher = {"loss": False}
    for metric in run.evaluation_metrics:
        if metric.higher_is_better is not None:
            higher |= dict.fromkeys(metric.latest_keys, metric.higher_is_better)
    for name, value in metrics.items():
        upward = higher.get(
            name.removeprefix("eval/").split("/", 1)[-1], higher.get(name.removeprefix("eval/"))
        )
        if upward is None or value != value:
            continue
        known = run.best_metrics.get(name)
        if known is None or (value > known if upward else value < known):
            run.best_metrics[name] = value
