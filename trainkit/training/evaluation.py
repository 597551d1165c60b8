"""Evaluation and prediction: every sample once, whatever the number of processes."""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.basics import rng
from trainkit.basics.device import wide_dtype
from trainkit.containers.tree import map_leaves
from trainkit.data import BatchInfo, MicroBatch, PreparedLoader
from trainkit.distributed import agreed_counts, concatenate, gather_samples
from trainkit.distributed.communicator import Communicator
from trainkit.distributed.gather import ROWS_VARY
from trainkit.errors import ConfigError, DataError
from trainkit.metrics.metric import Metric
from trainkit.precision import Precision
from trainkit.training.default_steps import is_default
from trainkit.training.logging import Log, LogSums
from trainkit.training.weighting import parse
from trainkit.types import NOTHING, Batch, LossFn, Scalars, StepOutput

if TYPE_CHECKING:
    from trainkit.metrics.model_outputs import Reading


EvaluationStep = Callable[[nn.Module, Batch], Mapping[str, Any]]

GATHER_EVERY = 16
"""Batches that are gathered in one collective; the same on all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Runs an evaluation step over a loader.

    No training state changes: the random streams of a run, the mode of every submodule and the
    gradient mode are put back, also after an error (rule 21).

    Args:
        step: Returns a mapping. `scores`, `predictions`, `probabilities` and `references` hold
            one entry for each sample. Every other entry is averaged: a scalar counts `weight`
            times (default: the number of samples), a `StepOutput` by its own weight, a tensor
            with one number for each sample counts each once. The `loss` may be what a training
            step returns: of several terms it is the sum of their means.
        loss_fn: Says how `scores` are read, where a metric uses what the step does not return.
        log: What the step may log to: between the batches its values are averaged like those
            that it returns. In a prediction they are dropped.
    """

    communicator: Communicator
    precision: Precision
    step: EvaluationStep
    loss_fn: LossFn | None
    log: Log

    def evaluate(
        self,
        module: nn.Module,
        loader: PreparedLoader,
        metrics: Sequence[Metric],
        name: str = "",
        watch: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] = iter,
    ) -> Scalars:
        """Return the metrics of `module` on `loader`, equal on all processes.

        Args:
            module: The user's own module, on its device.
            name: Of the loader, where it has one: stands in the metrics' names.
            watch: Stands between the loader's batches and the evaluation.
        """
        for metric in metrics:
            metric.reset()
        sums, chunks, is_empty = LogSums(), self._chunks(module, loader, metrics), True
        wants = bool(chunks.wanted) or not is_default(self.step)
        self.communicator.data_processes.wants_outputs = wants
        with _undisturbed(module, self), self.log.apart() as logged:
            with closing(self._outputs(module, loader, watch)) as results:
                for outputs, count in results:
                    is_empty = False
                    chunks.add(outputs)
                    if count:
                        _add_means(sums, outputs, count)
                chunks.flush()
            if is_empty:  # on all processes
                data = type(getattr(loader.source, "dataset", loader.source)).__name__
                raise DataError(
                    f"The evaluation loader{f' {name!r}' if name else ''}, of a `{data}`, gave no "
                    "batch: the data is empty, or used up (an iterator can be read once), or "
                    "`drop_last` leaves nothing of it."
                )
            sums.join(logged)
            means = sums.reduce(self.communicator.data_processes)
            weight = means.pop(_LOSS_WEIGHT, 1.0)
            if terms := [name for name in means if name.startswith(_LOSS_TERM)]:
                loss_terms = {name.removeprefix("\0"): means.pop(name) for name in terms}
                means |= {"loss": sum(loss_terms.values()), **loss_terms}
            values = _all_values(metrics, means, weight)
            if metrics:  # what draws, or sums in any order, differs by process
                values = self.communicator.processes.broadcast_object(values)
        prefix = f"eval/{name}/" if name else "eval/"
        return {f"{prefix}{key}": value for key, value in values.items()}

    def predict(self, module: nn.Module, loader: PreparedLoader, outputs: str) -> Any:
        """Return what was asked for of every sample once, in order, on the CPU of all processes."""
        parts: list[Any] = []
        sizes: list[int] = []
        chunks = self._chunks(module, loader, ())
        chunks.reading.check(outputs)
        self.communicator.data_processes.wants_outputs = True

        def on_host(leaf: Any) -> Any:
            return leaf.cpu() if isinstance(leaf, Tensor) else leaf  # it may not fit a device

        def keep(gathered: list[tuple[Any, int]]) -> None:
            parts.extend(map_leaves(part[outputs], on_host) for part, _ in gathered)
            sizes.extend(samples for _, samples in gathered)

        with (
            _undisturbed(module, self),
            self.log.apart(),
            closing(self._outputs(module, loader)) as results,
        ):
            for returned, _ in results:
                keep(chunks.hold({outputs: chunks.reading.predicted(returned, outputs)}))
            keep(chunks.flush())
        return concatenate(parts, sizes)

    def _chunks(
        self, module: nn.Module, loader: PreparedLoader, metrics: Sequence[Metric]
    ) -> "_Chunks":
        from trainkit.metrics.model_outputs import Reading  # only where something is evaluated

        processes = self.communicator.processes
        # What a step of the user's own returns as scores may be probabilities.
        reading = Reading(
            module,
            self.loss_fn,
            lambda number: int(processes.all_reduce(torch.tensor(number), "min")),
        )
        return _Chunks(self.communicator, loader, metrics, reading, is_default(self.step))

    def _outputs(
        self,
        module: nn.Module,
        loader: PreparedLoader,
        watch: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] = iter,
    ) -> Generator[tuple[Mapping[str, Any], int], None, None]:
        """Yield what the step returns of each batch, and its number of samples here."""
        processes, log = self.communicator.data_processes, self.log
        with closing(loader.batches(0)) as batches:
            for micro_batch in watch(batches):
                log.samples, log.zero_weight = micro_batch.count, micro_batch.count == 0
                processes.repeats = log.zero_weight
                repeats = rng.preserved(self.communicator.device) if log.zero_weight else NOTHING
                with self.precision.autocast(), repeats:
                    outputs = _mapping(self.step(module, micro_batch.data))
                processes.repeats = False
                yield outputs, micro_batch.count


@dataclass(kw_only=True, slots=True)
class RunEvaluation:
    """How a run is evaluated, and when."""

    evaluator: Evaluator
    loaders: Mapping[str, PreparedLoader]
    metrics: list[Metric] = field(default_factory=list)
    after_epochs: bool = False  # whether epochs end with an evaluation by themselves
    at_end: bool = False  # whether the last step is evaluated in any case
    check_replicas: bool = True  # whether the processes first compare what they hold
    is_planned: bool = True
    """Whether the latest evaluation was asked for, and not only made because the run stops."""
    evaluated_attempt: int = -1  # `TrainState.attempts` at the latest evaluation
    higher_is_better: dict[str, bool] = field(default_factory=dict)
    """Of each metric of which that is known."""
    keep_best: tuple[str, str] | None = None
    """By which metric checkpoints are kept, and whether its "min" or "max" is the best."""
    _watched: list[tuple[str, str, str | None]] = field(default_factory=list)

    def watch(self, watcher: str, metric: str, mode: str | None = None) -> None:
        """Let it be said where a metric is missing, or is better at its other end.

        Call it in `on_fit_start`.

        Args:
            watcher: Begins the sentence, such as "`EarlyStopping` watches".
            metric: What is watched.
            mode: Begins with "min" or "max": which end is taken for the good one; None: neither.
        """
        self._watched.append((watcher, metric, mode))

    def ends(self) -> dict[str, bool]:
        """Return of each metric whether higher is better: the user's `keep_best` is asked first."""
        chosen = () if self.keep_best is None else (self.keep_best,)
        return {**self.higher_is_better, **{name: mode == "max" for name, mode in chosen}}

    def learn(self, metrics: Iterable[Metric], names: Iterable[str]) -> None:
        """Note of the `names` that an evaluation by `metrics` gave which are better when higher."""
        higher = {"loss": False}
        for metric in metrics:
            if metric.higher_is_better is not None:
                higher |= dict.fromkeys(metric.latest_keys, metric.higher_is_better)
        for full_name in names:
            name = full_name.removeprefix("eval/")  # after which that of a loader may stand
            is_better = higher.get(name.split("/", 1)[-1], higher.get(name))
            if is_better is not None:
                self.higher_is_better[full_name] = is_better

    def check(self, names: Collection[str] | None, say: Callable[[str], None]) -> None:
        """Raise where what is watched is none of the `names` that evaluations give.

        None where these are not known. Of one whose bad end is taken for the good one, `say` so.
        """
        for index, (watcher, metric, mode) in enumerate(self._watched):
            if names is not None and metric not in names:
                why = "`fit` was given no evaluation loader. Call `fit(model, (train, eval), ...)`."
                if near := get_close_matches(metric, sorted(names), n=_SHOWN_NAMES, cutoff=0.0):
                    why = f"the evaluation gives only {near}. Use one of these, or add the metric "
                    why += "to `Evaluation(metrics=[...])`."
                raise ConfigError(f"{watcher} {metric!r}, but {why}")
            is_higher_better = self.higher_is_better.get(metric)
            if mode is None or is_higher_better is None:
                continue
            self._watched[index] = (watcher, metric, None)  # it is said once
            if mode.startswith("max") != is_higher_better:
                say(
                    f'trainkit: {watcher} {metric!r} with "{mode}", but '
                    f"{'higher' if is_higher_better else 'lower'} values of it are better: the "
                    "worst would count as the best. Turn it round, unless that is meant."
                )


_SHOWN_NAMES = 20
_LOSS_WEIGHT = "\0loss weight"
_LOSS_TERM = "\0loss/"
_NOT_AVERAGED = ("scores", "predictions", "probabilities", "references", "weight")


@dataclass(slots=True)
class _Chunks:
    """Outputs of consecutive batches, gathered together to spare collectives."""

    communicator: Communicator
    loader: PreparedLoader
    metrics: Sequence[Metric]
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
        # Copies: a replayed graph, as any model may, writes its next outputs where these lie.
        copies = map_leaves(entries, lambda it: it.clone() if isinstance(it, Tensor) else it)
        self.outputs.append(copies)
        info = self.communicator.loaders.current(self.loader)
        assert info is not None  # the loader has just yielded
        self.infos.append(info)
        return self.flush() if len(self.outputs) == GATHER_EVERY else []

    def flush(self) -> list[tuple[Any, int]]:
        """Gather what is held, feed the metrics, and return it with its number of samples."""
        if not self.outputs:
            return []
        processes = self.communicator.data_processes
        counts = agreed_counts(processes, self.infos)
        gathered = gather_samples(
            processes,
            self.outputs,
            counts,
            [info.local_size for info in self.infos],
            hint=ROWS_VARY * self.loader.rows_vary,
        )
        scores = gathered.get("scores") if self.knows_scores else None
        known = self.reading.known(scores) if isinstance(scores, Tensor) else None
        for metric in self.metrics:
            metric.convention = known
            metric.update(gathered[self.keys[metric.uses]], gathered["references"])
        self.outputs, self.infos = [], []
        return [(gathered, sum(map(sum, counts)))]


@contextmanager
def _undisturbed(module: nn.Module, evaluator: Evaluator) -> Iterator[None]:
    from trainkit.training.modes import in_evaluation_mode  # only where something is evaluated

    communicator = evaluator.communicator
    processes = communicator.data_processes
    undo = evaluator.precision.convert(module)
    repeats, processes.repeats = processes.repeats, False
    try:
        with (
            rng.undisturbed(communicator.device),
            communicator.loaders.apart(),
            torch.no_grad(),
            in_evaluation_mode(module),
        ):
            yield
    finally:
        undo()
        processes.repeats = repeats
        torch.clear_autocast_cache()  # else a forward around it takes casts that have no gradient


def _mapping(outputs: object) -> Mapping[str, Any]:
    if isinstance(outputs, Mapping):
        return outputs
    raise DataError(
        f"`evaluation_step` must return a mapping, but returned {type(outputs).__name__!r}. "
        'Return for example `{"loss": loss, "predictions": ..., "references": ...}`.'
    )


def _add_means(sums: LogSums, outputs: Mapping[str, Any], count: int) -> None:
    common = outputs.get("weight")
    common = count if common is None else common
    loss = outputs.get("loss")
    for name, value in outputs.items():
        if name in _NOT_AVERAGED or (value is loss and isinstance(loss, Mapping)):
            continue
        weight = common
        if isinstance(value, StepOutput):
            value, own = parse(value)
            weight = count if own is None else own
        if name == "loss":
            wide = weight if isinstance(weight, Tensor) else float(weight)
            sums.add(_LOSS_WEIGHT, wide, 1, "sum")
        if isinstance(value, Tensor) and value.shape == (count,) and name != "loss":
            sums.add(name, value.mean(dtype=wide_dtype(value.device.type)), count)
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            sums.add(name, value, weight)
        else:
            is_tensor = isinstance(value, Tensor)
            form = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
            raise DataError(
                f"`evaluation_step` returned `{name}` as {form}, but the batch has "
                f"{count} samples. Return a scalar mean (with `weight`), or a tensor with one "
                "number for each sample."
            )
    for term, each in loss.items() if isinstance(loss, Mapping) else ():
        value, weight = parse(each)
        sums.add(_LOSS_TERM + term, value, count if weight is None else weight)


def _all_values(metrics: Sequence[Metric], means: Scalars, loss_weight: float) -> Scalars:
    values = dict(means)
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
            if name in values:
                raise DataError(
                    f"Two metrics of an evaluation are called `{name}`. Rename the one that "
                    f"`{metric.name}` gives, or leave one out."
                )
            values[name] = value
    return values
