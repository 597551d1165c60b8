"""What a checkpoint of a run holds, and how it is put back (DESIGN 2.22, 2.29 to 2.31)."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit import rng
from trainkit.callback import Callback, CallbackList
from trainkit.distributed import on_main, together
from trainkit.errors import CheckpointError, ConfigError
from trainkit.fingerprint import (
    differences,
    fingerprint,
    horizon_problems,
    model_problems,
    name_problems,
    overruled_settings,
    parameter_names,
)
from trainkit.run import Run
from trainkit.schedule import LRSchedule
from trainkit.state import VERSION

if TYPE_CHECKING:
    from trainkit.checkpoint import Checkpoint, CheckpointStore

__all__ = ["collect", "describe", "restore", "save_now"]


def collect(run: Run, callbacks: CallbackList) -> dict[str, Any]:
    """Return what this process writes: its own streams and shards, and on process 0 all else.

    Every process must call it: a callback may need the others to tell its state.

    Raises:
        CheckpointError: The sharded tensors are not the same on all processes.
    """
    states = {c.name: c.state_dict() for c in callbacks.callbacks if _has_state(c)}
    rank = run.accelerator.process_index
    own = {_process_part(rank): _streams(run)}
    if run.strategy.sharded:
        return own | _split(run, _common(run, states), rank)
    return own | _common(run, states) if run.is_main_process else own


def _split(run: Run, parts: dict[str, Any], rank: int) -> dict[str, Any]:
    from trainkit.checkpoint.sharding import split  # other runs need none of it

    mine: dict[str, Any] = {}
    digests: list[str] = []

    def take() -> None:
        found, digest = split(parts, rank)
        mine.update(found)
        digests.append(digest)

    together(run.accelerator.processes, take)
    if len(set(run.accelerator.processes.all_gather_objects(digests[0]))) > 1:
        raise CheckpointError(
            "The states to be saved hold other sharded tensors on other processes. `state_dict` "
            "of callbacks and registered objects must return the same `DTensor`s on all."
        )
    return mine


def _common(run: Run, callbacks: dict[str, Any]) -> dict[str, Any]:
    """Return what all processes have alike, or hold together."""
    return {
        "model": run.module.state_dict(),  # first: it shards what an evaluation has gathered
        "optimizer": _optimizer_state(run.optimizer, run.module),
        "trainer": {
            "counters": run.state.state_dict(),
            "lr_scheduler": run.lr_schedule and run.lr_schedule.scheduler.state_dict(),
            "precision": run.precision.state_dict(),
            "weight_reference": run.weighting.reference,
            "metrics": run.metrics,
            "best_metrics": run.best_metrics,
            "last_logged_step": run.last_logged_step,
            "last_evaluated_attempt": run.last_evaluated_attempt,
            "callbacks": callbacks,
            "objects": {name: part.state_dict() for name, part in run.objects.items()},
        },
    }


def describe(run: Run) -> dict[str, Any]:
    """Return what stands in the manifest: for people, for retention, and to compare at a resume."""
    evaluated = run.last_evaluated_attempt == run.state.attempts
    return {
        "epoch": run.state.epoch,
        "metrics": dict(run.metrics) if evaluated else {},
        "config": asdict(run.config),
        "planned_steps": run.planned_steps,
        "strategy": run.strategy.name,
        "versions": {
            "trainkit": VERSION,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "fingerprint": fingerprint(run),
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
    if run.checkpoint is not None and run.last_saved_attempt == run.state.attempts:
        return run.checkpoint
    from trainkit.checkpoint import KeepPolicy  # runs without checkpoints need none of it

    run.resumed_from = run.state.step  # what is in the directory is its own
    run.saver = None
    run.save_checkpoints(KeepPolicy(keep_last=None))
    assert run.saver is not None
    try:
        path = run.saver.save(run.state.step, collect(run, callbacks), describe(run))
    finally:
        run.saver.close()
    assert path is not None
    run.checkpoint, run.last_saved_attempt = path, run.state.attempts
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
    processes = run.accelerator.processes
    found: list[str | None] = [None]
    on_main(processes, lambda: found.__setitem__(0, _find(run, resume)))
    path = processes.broadcast_object(found[0])
    if path is None:
        return
    present = _present(run, callbacks) if run.strategy.sharded else {}
    loaded: list[_Loaded] = []
    together(processes, lambda: loaded.append(_load(run, callbacks, Path(path), present, schedule)))
    planned = loaded[0].checkpoint.manifest.metadata["planned_steps"]
    if schedule == "keep" and planned != run.planned_steps:
        run.lr_schedule = remake(run.optimizer, planned)  # it must end where it would have ended
    _apply(run, callbacks, loaded[0], schedule)
    run.checkpoint = Path(path)


@dataclass(slots=True)
class _Loaded:
    """The parts of a checkpoint, in memory, verified and compared with the run."""

    checkpoint: "Checkpoint"
    model: dict[str, Any]
    optimizer: dict[str, Any]
    trainer: dict[str, Any]
    processes: list[dict[str, Any]]


def _find(run: Run, resume: str | Path) -> str | None:
    """Return the folder to resume from; process 0 decides."""
    if resume not in ("auto", "must"):
        path = Path(resume)
        _store(path.parent).open_unverified(path)  # the rest is verified while it is read
        return str(path)
    if run.output_dir is None:
        raise ConfigError(
            f'`resume="{resume}"` looks for checkpoints in the output directory, but the trainer '
            "has none. Pass `Trainer(output_dir=...)`."
        )
    store = _store(run.output_dir / "checkpoints")
    checkpoint = store.newest_valid(run.print)
    if checkpoint is not None:
        run.print(f"trainkit: resuming from `{checkpoint.path}` (step {checkpoint.step}).")
        return str(checkpoint.path)
    if resume == "must":
        raise CheckpointError(
            f'`resume="must"` was given, but `{store.directory}` holds no checkpoint that '
            'verifies. Use `resume="auto"` to start afresh in this case.',
            path=store.directory,
        )
    run.print(f"trainkit: no checkpoint in `{store.directory}`: a fresh start.")
    return None


def _store(directory: Path) -> "CheckpointStore":
    from trainkit.checkpoint import CheckpointStore  # runs without checkpoints need none of it

    return CheckpointStore(directory)


def _present(run: Run, callbacks: CallbackList) -> dict[str, Any]:
    """Return where the run has sharded tensors, in the form of the parts of a checkpoint.

    An optimizer has no state yet: what has the shape of a parameter lies as the parameter does.
    """
    stateful = _stateful(callbacks)
    return {
        "model": run.module.state_dict(),
        "optimizer": {"state": dict(run.module.named_parameters())},
        "trainer": {
            "callbacks": {name: callback.state_like(run) for name, callback in stateful.items()},
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
    checkpoint = _store(path.parent).open_unverified(path)
    manifest = checkpoint.manifest
    rank, size = run.accelerator.process_index, run.accelerator.num_processes
    same_size = manifest.world_size == size
    ranks = [rank] if same_size else range(manifest.world_size)
    loaded = _Loaded(
        checkpoint,
        checkpoint.read("model", present.get("model")),
        checkpoint.read("optimizer", present.get("optimizer")),
        checkpoint.read("trainer", present.get("trainer")),
        [checkpoint.read(_process_part(index)) for index in ranks],
    )
    checkpoint.verify_rest((rank, size))
    problems = [
        *differences(manifest.metadata["fingerprint"], fingerprint(run)),
        *name_problems("callback", loaded.trainer["callbacks"], _stateful(callbacks)),
        *name_problems("registered object", loaded.trainer["objects"], run.objects),
        *horizon_problems(manifest.metadata["config"], run, schedule),
        *model_problems(loaded.model, run.module.state_dict()),
    ]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"The checkpoint `{path}` does not fit:\n{listed}", path=path)
    return loaded


def _apply(run: Run, callbacks: CallbackList, loaded: _Loaded, schedule: str | None) -> None:
    trainer = loaded.trainer
    run.module.load_state_dict(loaded.model)
    run.state.load_state_dict(trainer["counters"])
    rescaled = schedule == "rescale" and run.lr_schedule is not None
    _load_optimizer(run, loaded.optimizer, rescaled=rescaled)
    if run.lr_schedule is not None and not rescaled:
        run.lr_schedule.scheduler.load_state_dict(trainer["lr_scheduler"])
    run.precision.load_state_dict(trainer["precision"])
    run.weighting.reference = trainer["weight_reference"]
    run.metrics, run.best_metrics = trainer["metrics"], trainer["best_metrics"]
    run.last_logged_step = trainer["last_logged_step"]
    run.last_evaluated_attempt = trainer["last_evaluated_attempt"]
    run.last_saved_attempt = run.state.attempts
    for callback in callbacks.callbacks:
        if _has_state(callback):
            callback.load_state_dict(trainer["callbacks"][callback.name])
    for name, part in run.objects.items():
        part.load_state_dict(trainer["objects"][name])
    run.run_id = loaded.checkpoint.manifest.run_id
    run.resumed_from = loaded.checkpoint.step
    _apply_streams(run, loaded)


def _apply_streams(run: Run, loaded: _Loaded) -> None:
    """Take this process's streams, or derive them where there are other processes now."""
    rank, step = run.accelerator.process_index, run.state.step
    if loaded.checkpoint.manifest.world_size == run.accelerator.num_processes:
        (own,) = loaded.processes
        run.sums.load_state_dict(own["log_sums"])
        run.streams = ((own["python"], own["numpy"], own["torch"]), own["device"])
        return
    if run.is_main_process:
        for of_process in loaded.processes:
            run.sums.merge(of_process["log_sums"])
    rng.seed_all(rng.device_seed(run.config.seed, rank, step))


def _streams(run: Run) -> dict[str, Any]:
    python, numpy, host = rng.save_host()
    device = run.strategy.device
    module = None if device.type == "cpu" else getattr(torch, device.type)
    return {
        "python": python,
        "numpy": numpy,
        "torch": host,
        "device": None if module is None else module.get_rng_state(device),
        "log_sums": run.sums.state_dict(),
    }


def _process_part(rank: int) -> str:
    return f"process-{rank:05d}"


def _has_state(callback: Callback) -> bool:
    own = getattr(callback.state_dict, "__func__", None)
    return own is not Callback.state_dict


def _stateful(callbacks: CallbackList) -> dict[str, Callback]:
    return {c.name: c for c in callbacks.callbacks if _has_state(c)}


def _optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state with parameters called by their names."""
    names = parameter_names(module)
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items()}
    return {"state": state, "groups": groups}


def _load_optimizer(run: Run, saved: dict[str, Any], *, rescaled: bool) -> None:
    optimizer = run.optimizer
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
    groups, first = [], 0
    for group, present in zip(saved["groups"], optimizer.param_groups, strict=True):
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        # A rescaled schedule has set the learning rate of this step already.
        values = {k: v for k, v in present.items() if k != "params"} if rescaled else group
        groups.append({**values, "params": numbers})
    state = {order.index(name): values for name, values in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
