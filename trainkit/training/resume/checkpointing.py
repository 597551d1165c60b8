"""What a checkpoint of a run holds, and how it is saved (rules 22, 28, 30)."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from trainkit.basics import rng
from trainkit.basics.quantized import with_scales
from trainkit.checkpoint import KeepPolicy
from trainkit.checkpoint.exact import parameter_states
from trainkit.checkpoint.format.codec import encode
from trainkit.checkpoint.forms import Only, at_least, one_of
from trainkit.checkpoint.per_process import Owners, take_states
from trainkit.checkpoint.training_state import (
    STREAM,
    STREAMS,
    named_optimizer_state,
    parts_of_rank,
    versions,
)
from trainkit.distributed import check_called_by_all, run_on_all
from trainkit.errors import CheckpointError, ConfigError, quoted
from trainkit.export.state import shapes_of
from trainkit.training.callback import Callback
from trainkit.training.callback_list import CallbackList
from trainkit.training.finite import finiteness
from trainkit.training.logging import BY_PROCESS
from trainkit.training.modes import in_training_mode
from trainkit.training.resume.fingerprint import fingerprint
from trainkit.training.resume.owners import state_of_schedule
from trainkit.training.resume.reference import describe_base, left_out
from trainkit.training.run import Run
from trainkit.training.run_parts import TrainState
from trainkit.training.setup.epoch_order import order_of
from trainkit.training.setup.run_folder import own_folder
from trainkit.training.several.objectives import COUNTERS

_COUNTERS = Only(dict.fromkeys(TrainState().state_dict(), int))
# Older ones have a reference of weights, which nothing reads.
_OF_OPTIMIZER = Only(dict.fromkeys(COUNTERS, int) | {"precision": Any, "weight_reference?": Any})
_OPTIMIZERS = Only({"together": bool | None, "by_name": {str: _OF_OPTIMIZER}})


@dataclass(kw_only=True, slots=True)
class RunState:
    """What all processes have alike of a run, beside its model and optimizer: a part `trainer`.

    The annotations are the forms that a resume compares with.
    """

    counters: Annotated[dict[str, int], _COUNTERS]
    lr_scheduler: Any
    precision: Any
    metrics: dict[str, float]
    best_metrics: dict[str, float]
    last_logged_step: int
    last_evaluated_attempt: Annotated[int, at_least(-1)]
    callbacks: dict[str, Any]
    objects: dict[str, Any]
    data: Annotated[Any, {str: STREAM}] = None  # of iterable data sets; older ones have none
    attributes: Annotated[Any, {str: Any}] = None  # of modules and the like; older ones have none
    optimizer_states: int | None = None  # of how many parameters; older ones do not tell
    optimizers: Annotated[Any, _OPTIMIZERS] = None  # beside their states, where there are several

    @classmethod
    def of(cls, run: Run) -> "RunState":
        """Return that of a run, without its callbacks, objects and data sets."""
        return cls(
            counters=run.state.state_dict(),
            lr_scheduler=run.lr_schedule and state_of_schedule(run.lr_schedule.scheduler),
            precision=run.precision.state_dict(),
            metrics=run.metrics,
            best_metrics=run.best_metrics,
            last_logged_step=run.logging.last_step,
            last_evaluated_attempt=run.evaluation.evaluated_attempt,
            callbacks={},
            objects={},
            optimizer_states=len(parameter_states(run.optimizer)),
            optimizers=run.objectives.state_dict() if run.optimizers else None,
        )

    def as_part(self) -> dict[str, Any]:
        """Return what is saved."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.optimizers is None:
            del values["optimizers"]
        return values


_SUM = (one_of("mean", BY_PROCESS, "sum", "max", "last"), float, float)
PROCESS = {
    **STREAMS,
    "log_sums": {str: _SUM},
    # What differs between the processes; older ones have none.
    "callbacks?": {str: Any},
    "objects?": {str: Any},
    "model?": {str: Any},
    "data?": {str: STREAM},
    "attributes?": {str: Any},
}
"""The form of what each process saves for itself."""

METADATA = {
    "epoch": int,
    "metrics": {str: float},
    "config": {"max_epochs": int | None, "max_steps": int | None},
    "planned_steps": int | None,
    "fingerprint": {
        "parameters": {str: [int]},
        "layouts?": {str: [int]},  # this and others that end so: older ones have none
        "optimizer": str,
        "optimizer groups": [[str]],
        "added parameters?": {str: bool},
        "scheduler": str | None,
        "scheduler advances?": str | None,
        "precision": str,
        "data set length": int | None,
        "global batch": int | None,
        "seed": at_least(-(1 << 63)),
        "training loaders?": str | None,
        "limit of an epoch?": str | None,
    },
    "versions?": {str: str},
    "data processes?": [int],
    "order?": {"facts": {str: Any}, "digest": str | None},
    "hparams?": {str: Any},
    "reference?": {"source": str, "digests": {str: str}, "made?": {str: str}},
}
"""The form of what `describe` returns."""


def owners_of(run: Run, callbacks: CallbackList) -> Owners:
    """Return the callbacks, registered objects and data sets with a state, and who has all else."""
    stateful = {
        callback.name: callback
        for callback in callbacks.callbacks
        if getattr(callback.state_dict, "__func__", None) is not Callback.state_dict
    }
    stream = run.train_loader.stream
    data = {} if stream is None else {"train": stream}
    return {
        "callbacks": stateful,
        "objects": dict(run.checkpoints.objects),
        "data": data,
        "attributes": {"changed": run.internals.attributes},
    }


def collect(run: Run, callbacks: CallbackList) -> dict[str, Any]:
    """Return what this process writes: its own streams and shards, and on process 0 all else.

    Call it where the model holds the weights to be evaluated, which readers of a checkpoint want.
    Every process must call it: a callback may need the others to tell its state.

    Raises:
        CheckpointError: The sharded tensors are not the same on all processes.
    """
    _tell_renamed(run)

    def take() -> tuple[dict[str, Any], dict[str, Any]]:
        model = _model_state(run)  # first: it shards what an evaluation has gathered
        parameters = dict(run.module.named_parameters())
        parts = {
            "model": model,
            "optimizer": named_optimizer_state(run.optimizer, parameters)
            | run.internals.weights.state_dict(run.module),
            "trainer": RunState.of(run).as_part(),
        }
        shapes = shapes_of(run.module)
        return parts, {"model": {key: v for key, v in model.items() if shapes.get(key) is None}}

    processes = run.strategy.processes
    with run.strategy.whole_state(run.optimizer):
        parts, alike, own = take_states(processes, owners_of(run, callbacks), take)
    parts["trainer"] |= alike
    streams = run.internals.streams or rng.state_dict(run.strategy.device)
    own = {**streams, **own, "log_sums": run.logging.sums.state_dict()}
    return parts_of_rank(processes, parts, own, sharded=run.strategy.sharded)


def _model_state(run: Run) -> dict[str, Any]:
    """Return what is saved of the model: all but the base that a checkpoint refers to."""
    model, referred = run.module.state_dict(), with_scales(run.module, left_out(run))
    return {name: value for name, value in model.items() if name not in referred}


def describe(run: Run, callbacks: CallbackList) -> dict[str, Any]:
    """Return what stands in the manifest: for people, for retention, and to compare at a resume.

    Every process must call it: it raises, on all of them, where nothing must be saved.
    """
    saver = run.checkpoints.saver
    assert saver is not None
    if saver.check_replicas:
        from trainkit.training.resume.replicas import check_replicas  # one process needs none of it

        parameters = dict(run.module.named_parameters())
        check_replicas(run.strategy, parameters, [run.optimizer], f"after step {run.state.step}")
    data = run.strategy.data_processes  # here those beside process 0
    evaluated = [[c.name, c.evaluated_weights] for c in callbacks.callbacks if c.evaluated_weights]
    return {
        "epoch": run.state.epoch,
        "metrics": dict(run.metrics) if run.is_evaluated else {},
        "config": asdict(run.config),
        "hparams": dict(run.hparams),
        "planned_steps": run.internals.scheduled_steps,
        "strategy": run.strategy.name,
        **({"data processes": [*data.ranks]} if data.size < run.strategy.processes.size else {}),
        "versions": versions(),
        "fingerprint": fingerprint(run),
        "order": order_of(run),
        **finiteness(run),
        **describe_base(run),
        **({"keep_best": list(saver.keep_best)} if saver.keep_best is not None else {}),
        **({"evaluated_weights": evaluated[0]} if evaluated else {}),
    }


def save_weights(run: Run, callbacks: CallbackList) -> None:
    """Save the weights of the evaluation that was just made, if they are kept alone as the best.

    Call it while the model holds them. Every process must call it.
    """
    saver, step = run.checkpoints.saver, run.state.step
    if saver is None or not saver.weights_only or not saver.is_among_best(step, run.metrics):
        return
    if run.checkpoint is None:  # nothing to resume from: what began anew would find these weights
        run.requests.checkpoint = True
        return
    phase = run.clock.enter("save")
    about = describe(run, callbacks)
    about.pop("evaluated_weights", None)  # the model holds them
    if "finite" not in about:
        model, strategy = {"model": _model_state(run)}, run.strategy
        parts = parts_of_rank(strategy.processes, model, None, sharded=strategy.sharded)
        saver.save(step, parts, about | {"weights_only": True})
    run.clock.enter(phase)


def save_now(run: Run | None, callbacks: CallbackList) -> Path:
    """Save a checkpoint of a training that has ended, and return its folder."""
    if run is None or run.phase != "done":
        raise ConfigError(
            "A checkpoint can be saved by the trainer only after `fit`. During `fit`, ask for one "
            "by `run.request_checkpoint()`: it is saved when the step is complete."
        )
    check_called_by_all(run.strategy.processes, "save_checkpoint")
    if run.checkpoint is not None and run.checkpoints.saved_attempt == run.state.attempts:
        return run.checkpoint

    run.checkpoints.saver = None
    with own_folder(run), in_training_mode(run.module):
        run.save_checkpoints(KeepPolicy(keep_last=None))
        assert run.checkpoints.saver is not None
        about = describe(run, callbacks)
        with run.evaluation_weights():
            path = run.checkpoints.saver.save(run.state.step, collect(run, callbacks), about)
    assert path is not None
    run.checkpoint, run.checkpoints.saved_attempt = path, run.state.attempts
    return path


def _tell_renamed(run: Run) -> None:
    """Say once that no resume finds parameters under the names that they have got."""
    given, names = run.internals.given_names, [name for name, _ in run.module.named_parameters()]
    if given is None or given == {*names}:
        return
    run.internals.given_names = None
    new = quoted(sorted({*names} - given) or sorted(given - {*names}))
    run.print(
        f"trainkit: parameters have other names than when `fit` began ({new}), as pruning and "
        "parametrizations give them. A resume from here on needs a model that has these: make it "
        "so before `fit`, for example by `prune.identity(module, name)`."
    )


def check_savable(run: Run, callbacks: CallbackList) -> None:
    """Raise where a save would fail, as far as that is known before the first step.

    Every process must call it. Nothing is copied or written.

    Raises:
        ConfigError: A state holds what has no form in a file; on all processes.
    """
    _check(run, _states(run, callbacks))
    check_optimizer_state(run)
    run.internals.given_names = {name for name, _ in run.module.named_parameters()}


def check_optimizer_state(run: Run) -> None:
    """Raise where the state of the optimizer cannot be saved; it makes it in its first step."""
    with run.strategy.whole_state(run.optimizer):
        _check(run, _optimizer_states(run))


def _states(run: Run, callbacks: CallbackList) -> Iterator[tuple[str, Any]]:
    """Yield the states of a run but for the optimizer's, with the path that leads to each."""
    yield "model", run.module.state_dict()
    for index, group in enumerate(run.optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield f'optimizer.param_groups[{index}]["{name}"]', value
    if run.lr_schedule is not None:
        yield "lr_scheduler", state_of_schedule(run.lr_schedule.scheduler)
    yield "precision", run.precision.state_dict()
    for name, part in run.checkpoints.objects.items():
        yield f"objects.{name}", part.state_dict()
    if run.train_loader.stream is not None:
        yield "data.train", run.train_loader.stream.state_dict()
    for callback in callbacks.callbacks:
        with suppress(Exception):  # it may have none yet, before the first step; a save will tell
            yield f"callbacks.{callback.name}", callback.state_dict()


def _optimizer_states(run: Run) -> Iterator[tuple[str, Any]]:
    saved = named_optimizer_state(run.optimizer, dict(run.module.named_parameters()))
    yield "optimizer.other", saved.get("other", {})
    for part in ("state", "parts"):
        for name, values in saved.get(part, {}).items():
            for key, value in values.items():
                yield f'optimizer.state["{name}"]["{key}"]', value


def _check(run: Run, states: Iterator[tuple[str, Any]]) -> None:
    def check() -> None:
        for path, state in states:
            parts = {path: state}
            try:
                if run.strategy.sharded:
                    from trainkit.checkpoint.resharding.sharding import split  # others need none

                    parts, _ = split(parts, 0)
                for part in parts.values():
                    encode(part, path)
            except CheckpointError as error:
                raise ConfigError(
                    f"No checkpoint of this run could be saved: {error} What is no state can be "
                    "kept where no checkpoint looks, such as in an attribute; or leave "
                    "`Checkpoint` out."
                ) from error

    run_on_all(run.strategy.processes, check)
