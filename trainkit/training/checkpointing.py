"""What a checkpoint of a run holds, and how it is put back (rules 22, 29 to 31)."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit import rng
from trainkit.checkpoint import exact
from trainkit.checkpoint.candidates import candidates, first_whole
from trainkit.checkpoint.resharding.subclasses import put_parts, take_parts
from trainkit.distributed import check_called_by_all, run_on_all
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export.state import shapes_of
from trainkit.training.callback import CallbackList
from trainkit.training.epoch_order import order_of, order_problems, say_changes
from trainkit.training.fingerprint import (
    differences,
    fingerprint,
    horizon_problems,
    model_problems,
    overruled_settings,
    parameter_names,
)
from trainkit.training.finite import finiteness
from trainkit.training.lr_schedule import LRSchedule
from trainkit.training.owners import owners_of, states_for, take_states
from trainkit.training.run import Run
from trainkit.training.state import VERSION

if TYPE_CHECKING:
    from trainkit.checkpoint import Checkpoint

__all__ = ["collect", "describe", "restore", "save_now"]


def collect(run: Run, callbacks: CallbackList) -> dict[str, Any]:
    """Return what this process writes: its own streams and shards, and on process 0 all else.

    Call it where the model holds the weights to be evaluated, which readers of a checkpoint want.
    Every process must call it: a callback may need the others to tell its state.

    Raises:
        CheckpointError: The sharded tensors are not the same on all processes.
    """
    parts: dict[str, Any] = {}

    def take() -> dict[str, Any]:
        parts.update(_common(run))
        shapes = shapes_of(run.module)
        return {key: value for key, value in parts["model"].items() if shapes.get(key) is None}

    alike, own = take_states(run, callbacks, take)
    parts["trainer"] |= alike
    from trainkit.checkpoint.format.names import process_part  # on demand

    processes = run.strategy.processes
    mine = {process_part(processes.rank): _streams(run) | own}
    if run.strategy.sharded:
        from trainkit.checkpoint.resharding.sharding import split_alike  # on demand

        return mine | split_alike(processes, parts)
    return mine | parts if run.is_main_process else mine


def _common(run: Run) -> dict[str, Any]:
    """Return what all processes have alike, or hold run_on_all."""
    return {
        "model": run.module.state_dict(),  # first: it shards what an evaluation has gathered
        "optimizer": take_parts(_optimizer_state(run.optimizer, run.module))
        | run.weights.state_dict(run.module),
        "trainer": {
            "counters": run.state.state_dict(),
            "lr_scheduler": run.lr_schedule and run.lr_schedule.scheduler.state_dict(),
            "precision": run.precision.state_dict(),
            "weight_reference": run.weighting.reference,
            "metrics": run.metrics,
            "best_metrics": run.best_metrics,
            "last_logged_step": run.logging.last_step,
            "last_evaluated_attempt": run.evaluation.last_attempt,
            "optimizer_states": len(exact.parameter_states(run.optimizer)),
        },
    }


def describe(run: Run) -> dict[str, Any]:
    """Return what stands in the manifest: for people, for retention, and to compare at a resume.

    Every process must call it: it raises, on all of them, where nothing must be saved.
    """
    assert run.checkpoints.saver is not None
    if run.checkpoints.saver.check_replicas:
        from trainkit.training.replicas import check_replicas  # one process needs none of it

        parameters = dict(run.module.named_parameters())
        check_replicas(run.strategy, parameters, [run.optimizer], f"after step {run.state.step}")
    return {
        "epoch": run.state.epoch,
        "metrics": dict(run.metrics) if run.is_evaluated else {},
        "config": asdict(run.config),
        "planned_steps": run.scheduled_steps,
        "strategy": run.strategy.name,
        "versions": {
            "trainkit": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "fingerprint": fingerprint(run),
        "order": order_of(run),
        **finiteness(run),
    }


def save_now(run: Run | None, callbacks: CallbackList) -> Path:
    """Save a checkpoint of a training that has ended, and return its folder.

    Raises:
        ConfigError: There was no training, or it is under way, or has no output directory.
    """
    if run is None or run.phase != "done":
        raise ConfigError(
            "A checkpoint can be saved by the trainer only after `fit`. During `fit`, ask for one "
            "by `run.request_checkpoint()`: it is saved when the step is complete."
        )
    check_called_by_all(run.strategy.processes, "save_checkpoint")
    if run.checkpoint is not None and run.checkpoints.last_attempt == run.state.attempts:
        return run.checkpoint
    from trainkit.checkpoint import KeepPolicy  # runs without checkpoints need none of it

    run.checkpoints.resumed_from = run.state.step  # what is in the directory is its own
    run.checkpoints.saver = None
    run.save_checkpoints(KeepPolicy(keep_last=None))
    assert run.checkpoints.saver is not None
    try:
        about = describe(run)
        with run.evaluation_weights():
            path = run.checkpoints.saver.save(run.state.step, collect(run, callbacks), about)
    finally:
        run.checkpoints.saver.close()
    assert path is not None
    run.checkpoint, run.checkpoints.last_attempt = path, run.state.attempts
    return path


def restore(
    run: Run,
    callbacks: CallbackList,
    resume: str | Path,
    schedule: str | None,
    remake: Callable[[Optimizer, int | None], LRSchedule | None],
) -> None:
    """Put a run back to where a checkpoint was made; one that finds none starts afresh.

    Nothing of the run changes before all of the checkpoint is known to be good and to fit.

    Args:
        run: A run that has not begun.
        callbacks: Its callbacks.
        resume: "auto", "must", or the folder of a checkpoint.
        schedule: What to do where `max_epochs` or `max_steps` changed.
        remake: Makes the learning-rate schedule of an optimizer for a number of planned steps.

    Raises:
        CheckpointError: Nothing can be resumed, or the checkpoint does not fit; on all processes.
    """
    processes = run.strategy.processes
    folders = candidates(run.output_dir, resume, run.print) if processes.is_main else iter(())
    present = _present(run, callbacks) if run.strategy.sharded else {}
    loaded: list[_Loaded] = []

    def load(folder: str) -> None:
        loaded[:] = [_load(run, callbacks, Path(folder), present, schedule)]

    may_skip = resume in ("auto", "must")
    skip = (lambda why: run.print(f"Skipped: {why}")) if may_skip else None
    folder = first_whole(processes, folders, load, skip)
    if folder is None:
        return
    planned = loaded[0].checkpoint.manifest.metadata["planned_steps"]
    if schedule == "keep" and planned != run.planned_steps:
        run.lr_schedule = remake(run.optimizer, planned)  # it must end where it would have ended
        run.scheduled_steps = planned
    run_on_all(processes, lambda: _apply(run, callbacks, loaded[0], schedule))
    metadata = loaded[0].checkpoint.manifest.metadata
    say_changes(metadata.get("order"), metadata["config"], run)
    run.checkpoint = Path(folder)


@dataclass(slots=True)
class _Loaded:
    """The parts of a checkpoint, in memory, verified and compared with the run."""

    checkpoint: "Checkpoint"
    model: dict[str, Any]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    processes: list[dict[str, Any]]
    states: dict[str, dict[str, Any]]  # of callbacks and registered objects, for this process


def _present(run: Run, callbacks: CallbackList) -> dict[str, Any]:
    """Return where the run has sharded tensors, in the form of the parts of a checkpoint.

    An optimizer has no state yet: what has the shape of a parameter lies as the parameter does.
    """
    stateful = owners_of(run, callbacks)["callbacks"]
    parameters = dict(run.module.named_parameters())
    return {
        "model": run.module.state_dict(),
        "optimizer": {"state": parameters, "training_weights": parameters},
        "trainer": {
            "callbacks": {
                name: callback.state_template(run) for name, callback in stateful.items()
            },
            "objects": {name: part.state_dict() for name, part in run.objects.items()},
        },
    }


def _load(
    run: Run,
    callbacks: CallbackList,
    path: Path,
    present: dict[str, Any],
    schedule: str | None,
) -> _Loaded:
    from trainkit.checkpoint import CheckpointStore  # runs without checkpoints need none of it
    from trainkit.checkpoint.format.names import process_part
    from trainkit.checkpoint.per_process import put_own
    from trainkit.training.loadable import check_metadata, check_parts, check_states

    checkpoint = CheckpointStore(path.parent).open_unverified(path)
    manifest = checkpoint.manifest
    check_metadata(checkpoint)
    # What does not fit is not broken: "auto" must not go back, and begin afresh in the end.
    told = differences(manifest.metadata["fingerprint"], fingerprint(run))
    _refuse(path, told + horizon_problems(manifest.metadata["config"], run, schedule))
    rank, size = run.processes.process_index, run.processes.num_processes
    ranks = [rank] if (same_size := manifest.world_size == size) else range(manifest.world_size)
    loaded = _Loaded(
        checkpoint,
        checkpoint.read("model", present.get("model")),
        checkpoint.read("optimizer", present.get("optimizer")),
        checkpoint.read("trainer", present.get("trainer")),
        [checkpoint.read(process_part(index)) for index in ranks],
        {},
    )
    checkpoint.verify_rest((rank, size))
    check_parts(run, checkpoint, loaded.model, loaded.optimizer, loaded.trainer, loaded.processes)
    loaded.states, unfit = states_for(
        run, callbacks, loaded.trainer, loaded.processes, same_size=same_size
    )
    if news := put_own(loaded.model, "model", loaded.processes, same_size=same_size):
        run.print(f"trainkit: {news}")
    unfit += _order_problems(run, callbacks, loaded)
    _refuse(path, unfit + model_problems(loaded.model, run.module))
    check_states(run, callbacks, checkpoint, loaded.states)
    return loaded


def _refuse(path: Path, problems: list[str]) -> None:
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"The checkpoint `{path}` does not fit:\n{listed}", path=path)


def _order_problems(run: Run, callbacks: CallbackList, loaded: _Loaded) -> list[str]:
    counters, saved = loaded.trainer["counters"], loaded.checkpoint.manifest.metadata.get("order")
    foreign = any(not type(c).__module__.startswith("trainkit.") for c in callbacks.callbacks)
    late = str(loaded.checkpoint.path) if run.objects or foreign else None
    return order_problems(saved, counters, run, late=late)


def _apply(run: Run, callbacks: CallbackList, loaded: _Loaded, schedule: str | None) -> None:
    from trainkit.checkpoint.forms import applying

    trainer, path = loaded.trainer, loaded.checkpoint.path
    older = "layouts" not in loaded.checkpoint.manifest.metadata["fingerprint"]
    with applying("The model", path):
        exact.load_model(run.module, loaded.model, older=older)
    run.state.load_state_dict(trainer["counters"])
    rescaled = schedule == "rescale" and run.lr_schedule is not None
    with applying("The optimizer", path):
        _load_optimizer(run, loaded, rescaled=rescaled)
        run.weights.load_state_dict(loaded.optimizer, run.module)
    if run.lr_schedule is not None and not rescaled:
        with applying("The learning-rate scheduler", path):
            run.lr_schedule.scheduler.load_state_dict(trainer["lr_scheduler"])
    with applying("The precision", path):
        run.precision.load_state_dict(trainer["precision"])
    run.weighting.reference = trainer["weight_reference"]
    run.metrics, run.best_metrics = trainer["metrics"], trainer["best_metrics"]
    run.logging.last_step = trainer["last_logged_step"]
    run.evaluation.last_attempt = trainer["last_evaluated_attempt"]
    run.checkpoints.last_attempt = run.state.attempts
    for kind, owners in owners_of(run, callbacks).items():
        for name, state in loaded.states[kind].items():
            with applying(f"`{kind}.{name}`", path):
                exact.load_state(owners[name], state)
    run.checkpoints.run_id = loaded.checkpoint.manifest.run_id
    run.checkpoints.resumed_from = loaded.checkpoint.step
    _apply_streams(run, loaded)


def _apply_streams(run: Run, loaded: _Loaded) -> None:
    """Take this process's streams, or derive them where there are other processes now."""
    rank, step = run.processes.process_index, run.state.step
    if loaded.checkpoint.manifest.world_size == run.processes.num_processes:
        (own,) = loaded.processes
        run.logging.sums.load_state_dict(own["log_sums"])
        run.streams = ((own["python"], own["numpy"], own["torch"]), own["device"])
        return
    if run.is_main_process:
        for of_process in loaded.processes:
            run.logging.sums.merge(of_process["log_sums"])
    rng.seed_all(rng.device_seed(run.config.seed, rank, step))


def _streams(run: Run) -> dict[str, Any]:
    python, numpy, host = rng.save_host()
    return {
        "python": python,
        "numpy": numpy,
        "torch": host,
        "device": rng.save_device(run.strategy.device),
        "log_sums": run.logging.sums.state_dict(),
    }


def _optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state with parameters called by their names."""
    names = parameter_names(module)
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    states = exact.parameter_states(optimizer)
    state = {names[id(p)]: dict(values) for p, values in states.items()}
    return take_parts({"state": state, "groups": groups}) | exact.other_state(optimizer)


def _load_optimizer(run: Run, loaded: _Loaded, *, rescaled: bool) -> None:
    optimizer, saved = run.optimizer, loaded.optimizer
    if rescaled:
        assert run.lr_schedule is not None
        run.lr_schedule.catch_up(run.state)
    overruled = [] if rescaled else overruled_settings(saved["groups"], run)
    if overruled:
        run.print(
            f"trainkit: the optimizer goes on with the checkpoint's {', '.join(overruled)}: a "
            "resumed run is the same run. For other settings, begin a new one with its weights."
        )
    order = [name for group in saved["groups"] for name in group["params"]]
    parameters = dict(run.module.named_parameters())
    added = loaded.checkpoint.manifest.metadata["fingerprint"].get("added parameters", {})
    for group in saved["groups"][len(optimizer.param_groups) :]:
        mine = [parameters[name].requires_grad_(added[name]) for name in group["params"]]
        optimizer.add_param_group({**group, "params": mine})
    groups, first = [], 0
    for group, present in zip(saved["groups"], optimizer.param_groups, strict=True):
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        # A rescaled schedule has set the learning rate of this step already.
        values = {k: v for k, v in present.items() if k != "params"} if rescaled else group
        groups.append({**values, "params": numbers})
    state = {order.index(name): values for name, values in saved["state"].items()}
    states = {"state": state, "param_groups": groups}
    exact.load_optimizer(optimizer, states, list(map(loaded.model.get, order)), saved.get("other"))
    put_parts(optimizer, saved, parameters)
