"""What a checkpoint of a run holds, and how it is put back (rules 22, 29 to 31)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from trainkit.basics import rng
from trainkit.checkpoint import Checkpoint, KeepPolicy
from trainkit.checkpoint.candidates import candidates, first_verified
from trainkit.checkpoint.checkpoint import open_share
from trainkit.checkpoint.exact import load_model, load_state, parameter_states
from trainkit.checkpoint.forms import applying, refuse
from trainkit.checkpoint.per_process import Owners, put_own, states_for, take_states
from trainkit.checkpoint.training_state import (
    load_named_optimizer_state,
    named_optimizer_state,
    parts_of_rank,
    read_rank_parts,
    versions,
)
from trainkit.distributed import check_called_by_all, run_on_all
from trainkit.errors import ConfigError
from trainkit.export.state import shapes_of
from trainkit.training.callback import Callback, CallbackList
from trainkit.training.finite import finiteness
from trainkit.training.lr_schedule import LRSchedule, LRSchedules
from trainkit.training.modes import in_training_mode
from trainkit.training.resume.fingerprint import (
    differences,
    fingerprint,
    horizon_problems,
    model_problems,
    overruled_settings,
)
from trainkit.training.resume.reference import check_base, describe_base, left_out, read_model
from trainkit.training.resume.resume_check import check_metadata, check_parts, check_states
from trainkit.training.run import Run
from trainkit.training.setup.epoch_order import order_of, order_problems, say_changes
from trainkit.training.setup.run_folder import own_folder
from trainkit.training.several.optimizers import Optimizers

__all__ = ["collect", "describe", "restore", "save_now", "save_weights"]


def owners_of(run: Run, callbacks: CallbackList) -> Owners:
    """Return the callbacks, registered objects and data sets that have a state of their own."""
    stateful = {
        callback.name: callback
        for callback in callbacks.callbacks
        if getattr(callback.state_dict, "__func__", None) is not Callback.state_dict
    }
    stream = run.train_loader.stream
    data = {} if stream is None else {"train": stream}
    return {"callbacks": stateful, "objects": dict(run.objects), "data": data}


def collect(run: Run, callbacks: CallbackList) -> dict[str, Any]:
    """Return what this process writes: its own streams and shards, and on process 0 all else.

    Call it where the model holds the weights to be evaluated, which readers of a checkpoint want.
    Every process must call it: a callback may need the others to tell its state.

    Raises:
        CheckpointError: The sharded tensors are not the same on all processes.
    """

    def take() -> tuple[dict[str, Any], dict[str, Any]]:
        parts, shapes = _common(run), shapes_of(run.module)
        entries = {key: v for key, v in parts["model"].items() if shapes.get(key) is None}
        return parts, {"model": entries}

    processes = run.strategy.processes
    parts, alike, own = take_states(processes, owners_of(run, callbacks), take)
    parts["trainer"] |= alike
    streams = run.streams or rng.state_dict(run.strategy.device)
    own = {**streams, **own, "log_sums": run.logging.sums.state_dict()}
    return parts_of_rank(processes, parts, own, sharded=run.strategy.sharded)


def _common(run: Run) -> dict[str, Any]:
    """Return what all processes have alike, or hold together."""
    optimizer = run.optimizer
    several = (
        {"optimizers": optimizer.training_state()} if isinstance(optimizer, Optimizers) else {}
    )
    return {
        "model": _model_state(run),  # first: it shards what an evaluation has gathered
        "optimizer": named_optimizer_state(optimizer, dict(run.module.named_parameters()))
        | run.weights.state_dict(run.module),
        "trainer": {
            "counters": run.state.state_dict(),
            "lr_scheduler": run.lr_schedule and run.lr_schedule.scheduler.state_dict(),
            "precision": run.precision.state_dict(),
            "metrics": run.metrics,
            "best_metrics": run.best_metrics,
            "last_logged_step": run.logging.last_step,
            "last_evaluated_attempt": run.evaluation.last_attempt,
            "optimizer_states": len(parameter_states(optimizer)),
            **several,
        },
    }


def _model_state(run: Run) -> dict[str, Any]:
    """Return what is saved of the model: all but the base that a checkpoint refers to."""
    model, referred = run.module.state_dict(), set(left_out(run))
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
    evaluated = [[c.name, c.evaluated_weights] for c in callbacks.callbacks if c.evaluated_weights]
    return {
        "epoch": run.state.epoch,
        "metrics": dict(run.metrics) if run.is_evaluated else {},
        "config": asdict(run.config),
        "hparams": dict(run.hparams),
        "planned_steps": run.scheduled_steps,
        "strategy": run.strategy.name,
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
    phase, run.phase = run.phase, "save"
    about = describe(run, callbacks)
    about.pop("evaluated_weights", None)  # the model holds them
    if "finite" not in about:
        model, strategy = {"model": _model_state(run)}, run.strategy
        parts = parts_of_rank(strategy.processes, model, None, sharded=strategy.sharded)
        saver.save(step, parts, about | {"weights_only": True})
    run.phase = phase


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

    run.checkpoints.resumed_from = run.state.step  # what is in the directory is its own
    run.checkpoints.saver = None
    with own_folder(run), in_training_mode(run.module):
        run.save_checkpoints(KeepPolicy(keep_last=None))
        assert run.checkpoints.saver is not None
        about = describe(run, callbacks)
        with run.evaluation_weights():
            path = run.checkpoints.saver.save(run.state.step, collect(run, callbacks), about)
    assert path is not None
    run.checkpoint, run.checkpoints.last_attempt = path, run.state.attempts
    return path


def restore(
    run: Run,
    callbacks: CallbackList,
    resume: str | Path,
    schedule: str | None,
    remake: Callable[[Optimizer, int | None], LRSchedule | LRSchedules | None],
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
    found = first_verified(
        processes,
        folders,
        lambda folder: _load(run, callbacks, Path(folder), present, schedule),
        (lambda why: run.print(f"Skipped: {why}")) if resume in ("auto", "must") else None,
    )
    if found is None:
        return
    folder, loaded = found
    if resume in ("auto", "must"):
        run.print(f"trainkit: resuming from `{folder}` (step {loaded.checkpoint.step}).")
    metadata = loaded.checkpoint.manifest.metadata
    run_on_all(processes, lambda: check_base(Path(folder), metadata, run.module))
    planned = metadata["planned_steps"]
    if schedule == "keep" and planned != run.planned_steps:
        run.lr_schedule = remake(run.optimizer, planned)  # it must end where it would have ended
        run.scheduled_steps = planned
    run_on_all(processes, lambda: _apply(run, callbacks, loaded, schedule))
    say_changes(metadata, run)
    if run.end_reached is not None:
        run.print(
            f"trainkit: this run has ended ({run.end_reached}): nothing is trained, and the model "
            "has its weights. Another training, such as of other data, needs another `output_dir`."
        )
    run.checkpoint = Path(folder)


@dataclass(slots=True)
class _Loaded:
    """The parts of a checkpoint, in memory, verified and compared with the run."""

    checkpoint: Checkpoint
    model: dict[str, Any]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    ranks: dict[int, dict[str, Any]]  # that of this process alone, where as many saved it
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
    processes = run.strategy.processes
    checkpoint = open_share(path, processes.world)
    manifest = checkpoint.manifest
    check_metadata(checkpoint)
    # What does not fit is not broken: "auto" must not go back, and begin afresh in the end.
    told = differences(manifest.metadata["fingerprint"], fingerprint(run))
    refuse(path, told + horizon_problems(manifest.metadata["config"], run, schedule))
    model = read_model(checkpoint, run.module, present.get("model"))
    optimizer, trainer = (checkpoint.read(p, present.get(p)) for p in ("optimizer", "trainer"))
    ranks = read_rank_parts(checkpoint, processes, manifest.world_size)
    checkpoint.verify_rest()
    check_parts(run, checkpoint, model, optimizer, trainer, ranks)
    owners, same_size = owners_of(run, callbacks), manifest.world_size == processes.size
    own = list(ranks.values())
    states, unfit = states_for(owners, trainer, own, rank=processes.rank, same_size=same_size)
    if news := put_own(model, "model", own, same_size=same_size):
        run.print(f"trainkit: {news}")
    foreign = any(not type(c).__module__.startswith("trainkit.") for c in callbacks.callbacks)
    late = str(path) if run.objects or foreign else None
    unfit += order_problems(manifest.metadata.get("order"), trainer["counters"], run, late=late)
    refuse(path, unfit + model_problems(model, run.module))
    check_states(run, owners, checkpoint, states)
    return _Loaded(checkpoint, model, optimizer, trainer, ranks, states)


def _apply(run: Run, callbacks: CallbackList, loaded: _Loaded, schedule: str | None) -> None:
    trainer, path = loaded.trainer, loaded.checkpoint.path
    older = "layouts" not in loaded.checkpoint.manifest.metadata["fingerprint"]
    with applying("The model", path):
        load_model(run.module, loaded.model, older=older)
    run.state.load_state_dict(trainer["counters"])
    if isinstance(run.optimizer, Optimizers):
        with applying("The optimizers", path):
            run.optimizer.load_training_state(trainer["optimizers"])
    rescaled = schedule == "rescale" and run.lr_schedule is not None
    with applying("The optimizer", path):
        _load_optimizer(run, loaded, rescaled=rescaled)
        run.weights.load_state_dict(loaded.optimizer, run.module)
    if run.lr_schedule is not None and not rescaled:
        with applying("The learning-rate scheduler", path):
            run.lr_schedule.scheduler.load_state_dict(trainer["lr_scheduler"])
    with applying("The precision", path):
        run.precision.load_state_dict(trainer["precision"])
    run.metrics, run.best_metrics = trainer["metrics"], trainer["best_metrics"]
    run.logging.last_step = trainer["last_logged_step"]
    run.evaluation.last_attempt = trainer["last_evaluated_attempt"]
    run.checkpoints.last_attempt = run.state.attempts
    for kind, owners in owners_of(run, callbacks).items():
        for name, state in loaded.states[kind].items():
            with applying(f"`{kind}.{name}`", path):
                load_state(owners[name], state)
    run.checkpoints.run_id = loaded.checkpoint.manifest.run_id
    run.checkpoints.resumed_from = loaded.checkpoint.step
    _apply_streams(run, loaded)


def _apply_streams(run: Run, loaded: _Loaded) -> None:
    """Take this process's streams, or derive them where there are other processes now."""
    rank, step = run.processes.process_index, run.state.step
    if loaded.checkpoint.manifest.world_size == run.processes.num_processes:
        run.streams = loaded.ranks[rank]
        run.logging.sums.load_state_dict(run.streams["log_sums"])
        return
    if run.is_main_process:
        share = run.processes.num_processes / loaded.checkpoint.manifest.world_size
        for own in loaded.ranks.values():
            run.logging.sums.merge(own["log_sums"], share)
    rng.seed_all(rng.device_seed(run.config.seed, rank, step), run.strategy.device)


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
    parameters = dict(run.module.named_parameters())
    added = loaded.checkpoint.manifest.metadata["fingerprint"].get("added parameters", {})
    for group in saved["groups"][len(optimizer.param_groups) :]:
        mine = [parameters[name].requires_grad_(added[name]) for name in group["params"]]
        optimizer.add_param_group({**group, "params": mine})
    # A rescaled schedule has set the learning rate of this step already.
    load_named_optimizer_state(optimizer, saved, loaded.model, keep_settings=rescaled)
