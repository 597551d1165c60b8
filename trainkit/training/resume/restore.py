"""How a run goes on from a checkpoint: compared, read, looked at, then applied (rule 29)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.basics import rng
from trainkit.basics.outside import is_users
from trainkit.checkpoint import Checkpoint
from trainkit.checkpoint.candidates import candidates, first_verified
from trainkit.checkpoint.checkpoint import open_share
from trainkit.checkpoint.exact import load_model, load_state
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.forms import Only, Unfit, check_form
from trainkit.checkpoint.per_process import Owners, put_own, states_for
from trainkit.checkpoint.training_state import (
    SCALE,
    applying,
    check_optimizer,
    check_rank_parts,
    check_schedule,
    load_named_optimizer_state,
    read_rank_parts,
    refuse,
    same_torch,
)
from trainkit.distributed import run_on_all
from trainkit.errors import CheckpointError
from trainkit.lazy import ask
from trainkit.precision import FP16
from trainkit.training.callback_list import CallbackList
from trainkit.training.lr_schedule import LRSchedule, LRSchedules
from trainkit.training.resume.checkpointing import METADATA, PROCESS, RunState, owners_of
from trainkit.training.resume.fingerprint import (
    changes,
    differences,
    fingerprint,
    horizon_problems,
    model_problems,
    overruled_settings,
    say_changes,
)
from trainkit.training.resume.reference import check_base, read_model
from trainkit.training.resume.replicas import watch_restored
from trainkit.training.run import Run
from trainkit.training.setup.epoch_order import order_problems
from trainkit.training.several.optimizers import described


def restore(
    run: Run,
    callbacks: CallbackList,
    resume: str | Path,
    schedule: str | None,
    remake: Callable[[int | None], LRSchedule | LRSchedules | None],
) -> None:
    """Put a run back to where a checkpoint was made; one that finds none starts afresh.

    Nothing of the run changes before all of the checkpoint is known to be good and to fit.

    Args:
        run: A run that has not begun.
        resume: "auto", "must", or the folder of a checkpoint.
        schedule: What to do where `max_epochs` or `max_steps` changed.
        remake: Makes the learning-rate schedule of the run for a number of planned steps.

    Raises:
        CheckpointError: Nothing can be resumed, or the checkpoint does not fit; on all processes.
    """
    processes = run.strategy.processes
    folders = candidates(run.output_dir, resume, run.print) if processes.is_main else iter(())
    present = _present(run, callbacks) if run.strategy.sharded else {}

    def load(folder: str) -> _Loaded:
        mirror, sharded = run.internals.mirror, run.strategy.sharded
        with ask("on_this_machine")(Path(folder), processes, mirror, sharded=sharded) as here:
            return _load(run, callbacks, here, present, schedule)

    verified = first_verified(
        processes,
        folders,
        load,
        (lambda why: run.print(f"Skipped: {why}")) if resume in ("auto", "must") else None,
    )
    if verified is None:
        return
    folder, loaded = verified
    if resume in ("auto", "must"):
        run.print(f"trainkit: resuming from `{folder}` (step {loaded.checkpoint.step}).")
    metadata = loaded.checkpoint.manifest.metadata
    run_on_all(processes, lambda: check_base(Path(folder), metadata, run.module))
    planned = metadata["planned_steps"]
    if schedule == "keep" and planned != run.planned_steps:
        run.lr_schedule = remake(planned)  # it must end where it would have ended
        run.internals.scheduled_steps = planned
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
    state: RunState
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
            "objects": {name: part.state_dict() for name, part in run.checkpoints.objects.items()},
        },
    }


def _load(
    run: Run, callbacks: CallbackList, here: Any, present: dict[str, Any], schedule: str | None
) -> _Loaded:
    """Read a checkpoint, and look at all that the run takes of it."""
    path, bring = here
    processes = run.strategy.processes
    checkpoint = open_share(path, processes.world, bring)
    manifest = checkpoint.manifest
    _check_manifest(checkpoint)
    # What does not fit is not broken: "auto" must not go back, and begin afresh in the end.
    told = differences(manifest.metadata["fingerprint"], fingerprint(run))
    refuse(path, told + horizon_problems(manifest.metadata["config"], run, schedule))

    model = read_model(checkpoint, run.module, present.get("model"))
    optimizer, trainer = (checkpoint.read(p, present.get(p)) for p in ("optimizer", "trainer"))
    same_size = not _others(manifest, run)
    ranks = read_rank_parts(checkpoint, processes, processes.size if same_size else 0)
    checkpoint.verify_rest()

    with checkpoint.blaming("trainer"):
        check_form(trainer, RunState)
        names = {one.name for one in fields(RunState)}
        state = RunState(**{name: trainer[name] for name in trainer if name in names})
        _check_counters(run, checkpoint, state)
        _check_plugins(run, checkpoint, state)
    check_model_form(checkpoint, "model", model, run.module)
    _check_weights(run, checkpoint, model, optimizer, state)
    for rank, part in ranks.items():
        with checkpoint.blaming(process_part(rank)):
            check_form(part, PROCESS)

    owners = owners_of(run, callbacks)
    own = list(ranks.values())
    states, unfit = states_for(owners, trainer, own, rank=processes.rank, same_size=same_size)
    if news := put_own(model, "model", own, same_size=same_size):
        run.print(f"trainkit: {news}")
    foreign = any(not type(c).__module__.startswith("trainkit.") for c in callbacks.callbacks)
    found = states["attributes"].get("changed")  # whose form is looked at below
    changed = isinstance(found, dict) and any(f"{name}".startswith("data") for name in found)
    late = str(path) if run.checkpoints.objects or foreign or changed else None
    unfit += order_problems(manifest.metadata.get("order"), state.counters, run, late=late)
    refuse(path, unfit + model_problems(model, run.module))
    _check_owners(run, owners, checkpoint, states)
    return _Loaded(checkpoint, model, optimizer, state, ranks, states)


def _check_manifest(checkpoint: Checkpoint) -> None:
    """Check the manifest, and that the parts are there that every checkpoint of a run has."""
    if not checkpoint.manifest.is_resumable:
        raise CheckpointError(
            f"`{checkpoint.path}` holds the weights alone, without optimizer and counters: no "
            'training can go on from it. Pass `resume="auto"` for the newest that has them, or '
            "begin a new training, with `load_checkpoint_in_model(model, path)` before it.",
            path=checkpoint.path,
        )
    with checkpoint.blaming(None):
        missing = {"model", "optimizer", "trainer"} - {*checkpoint.names()}
        if missing:
            raise Unfit(f"has no part {min(missing)!r}", "files")
        check_form(checkpoint.manifest.metadata, METADATA, "metadata")
    check_rank_parts(checkpoint)


def _check_counters(run: Run, checkpoint: Checkpoint, state: RunState) -> None:
    """Check counters against the manifest and each other."""
    counters, manifest = state.counters, checkpoint.manifest
    told = manifest.metadata["fingerprint"]
    for name, value in {"step": manifest.step, "epoch": manifest.metadata["epoch"]}.items():
        if counters[name] != value:
            raise Unfit(f"is {counters[name]}, but {value} in the manifest", "counters", name)
    attempts, position = counters["step"] + counters["skipped_steps"], counters["epoch_samples"]
    for value, limit, *keys in (
        (counters["consecutive_skips"], counters["skipped_steps"], "counters", "consecutive_skips"),
        (position, counters["samples_seen"], "counters", "epoch_samples"),
        (state.last_logged_step, counters["step"], "last_logged_step"),
        (state.last_evaluated_attempt, attempts, "last_evaluated_attempt"),
    ):
        if value > limit:
            raise Unfit(f"is {value}, more than {limit} can be", *keys)
    length, batch = told["data set length"], told["global batch"]
    if run.train_loader.order_facts().get("data") == "map-style" and length and batch:
        ends = position >= length and not counters["epoch"]  # later ones may grow
        if position % batch or ends:
            why = f"is {position}, where no step of {batch} of {length} samples begins"
            raise Unfit(why, "counters", "epoch_samples")


def _check_plugins(run: Run, checkpoint: Checkpoint, state: RunState) -> None:
    """Check the states of the scheduler, of the precision and of several optimizers."""
    told, scheduler, saved = (
        checkpoint.manifest.metadata["fingerprint"],
        run.lr_schedule,
        state.lr_scheduler,
    )
    if (saved is None) != (told["scheduler"] is None):
        raise Unfit(f"must be that of {told['scheduler']}", "lr_scheduler")
    if scheduler is not None and scheduler.kind == told["scheduler"]:
        groups, strict = len(told["optimizer groups"]), same_torch(checkpoint)
        form = partial(check_schedule, scheduler=scheduler.scheduler, groups=groups, strict=strict)
        check_form(saved, form, "lr_scheduler")
    scale: Any = Any if run.precision.state_dict() else Only()
    if isinstance(run.precision, FP16) and told["precision"] == "fp16":
        scale = SCALE
    check_form(state.precision, scale, "precision")
    if run.optimizers and described(run.optimizer) == told["optimizer"]:
        by_name = Only({key: {"precision": scale} for key in run.optimizers})
        check_form(state.optimizers, {"by_name": by_name}, "optimizers")


def check_model_form(checkpoint: Checkpoint, part: str, saved: Any, module: nn.Module) -> None:
    """Check that a part holds tensors of the dtypes of a model, where that has tensors."""
    with checkpoint.blaming(part):
        check_form(saved, {})
        state = module.state_dict()
        dtypes = {n: v.dtype for n, v in state.items() if n in saved and isinstance(v, Tensor)}
        check_form(saved, dict.fromkeys(dtypes, Tensor))
    saved_dtypes = {name: saved[name].dtype for name in dtypes}
    refuse(checkpoint.path, changes("entry of the model's state", "dtype", saved_dtypes, dtypes))


def _check_weights(
    run: Run, checkpoint: Checkpoint, model: Any, optimizer: Any, state: RunState
) -> None:
    """Check model and optimizer against what the manifest tells of them."""
    told = checkpoint.manifest.metadata["fingerprint"]
    with checkpoint.blaming("model"):
        for name, shape in told["parameters"].items():
            value = model.get(name)
            if isinstance(value, Tensor) and list(value.shape) != list(shape):
                raise Unfit(f"has the shape {list(value.shape)}, not {list(shape)}", name)
    parameters = dict(run.module.named_parameters())
    with checkpoint.blaming("optimizer"):
        check_optimizer(optimizer, run.optimizer, parameters, strict=same_torch(checkpoint))
        if [group["params"] for group in optimizer["groups"]] != told["optimizer groups"]:
            raise Unfit("holds other parameters than the manifest tells", "groups")
        count = len(optimizer["state"])
        if state.optimizer_states not in (None, count):
            raise Unfit(f"is of {count} parameters, not of {state.optimizer_states}", "state")


def _check_owners(
    run: Run, owners: Owners, checkpoint: Checkpoint, states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Let callbacks, registered objects and data sets look at their states."""
    for kind in owners:
        for name, state in states[kind].items():
            check = getattr(owners[kind][name], "check_state_dict", None)
            if check is None:
                continue
            with checkpoint.blaming("trainer"):
                try:
                    check(*(run, state) if kind == "callbacks" else (state,))
                except Unfit as error:
                    raise Unfit(error.why, kind, name, *error.keys) from None
                except CheckpointError as error:
                    error.path = error.path or checkpoint.path
                    raise
                except Exception as error:
                    raise CheckpointError(
                        f"`{kind}.{name}` of the checkpoint `{checkpoint.path}` is refused by its "
                        f"owner: {error} Nothing of the checkpoint was applied.",
                        path=checkpoint.path,
                    ) from error


def _apply(run: Run, callbacks: CallbackList, loaded: _Loaded, schedule: str | None) -> None:
    state, path = loaded.state, loaded.checkpoint.path
    older = "layouts" not in loaded.checkpoint.manifest.metadata["fingerprint"]
    with applying("The model", path):
        load_model(run.module, loaded.model, older=older)
    run.state.load_state_dict(state.counters)
    if run.optimizers:
        with applying("The optimizers", path):
            run.objectives.load_state_dict(state.optimizers)
    rescaled = schedule == "rescale" and run.lr_schedule is not None
    with applying("The optimizer", path):
        _load_optimizer(run, loaded, rescaled=rescaled)
        run.internals.weights.load_state_dict(loaded.optimizer, run.module)
    if run.lr_schedule is not None and not rescaled:
        with applying("The learning-rate scheduler", path):
            run.lr_schedule.scheduler.load_state_dict(state.lr_scheduler)
    with applying("The precision", path):
        run.precision.load_state_dict(state.precision)
    run.metrics, run.best_metrics = state.metrics, state.best_metrics
    run.logging.last_step = state.last_logged_step
    run.evaluation.evaluated_attempt = state.last_evaluated_attempt
    run.checkpoints.saved_attempt = run.state.attempts
    for kind, owners in owners_of(run, callbacks).items():
        for name, own in loaded.states[kind].items():
            with applying(f"`{kind}.{name}`", path):
                load_state(owners[name], own)
    run.checkpoints.run_id = loaded.checkpoint.manifest.run_id
    run.checkpoints.resumed_from = loaded.checkpoint.step
    _apply_streams(run, loaded)
    if any(is_users(type(each)) for each in callbacks.callbacks):
        tell_overwritten = watch_restored(run.module, run.optimizer, run.print)
        run.internals.attributes.tell_overwritten = tell_overwritten


def _apply_streams(run: Run, loaded: _Loaded) -> None:
    """Keep this process's streams, or derive them; `phases.begin` puts them back."""
    rank, step = run.strategy.processes.rank, run.state.step
    saved = _others(loaded.checkpoint.manifest, run)
    if not saved:
        run.internals.streams = loaded.ranks[rank]
        run.logging.sums.load_state_dict(run.internals.streams["log_sums"])
        return
    data = run.strategy.data_processes
    for each in saved if run.is_main_process else ():  # whoever shared their samples has the same
        run.logging.sums.merge(loaded.ranks[each]["log_sums"], data.size / len(saved))
    rng.seed_all(rng.device_seed(run.config.seed, data.rank, step), run.strategy.device)


def _others(manifest: Any, run: Run) -> list[int]:
    """Return the processes that had samples of their own; none if it is as many of both now."""
    saved: list[int] = manifest.metadata.get("data processes", [*range(manifest.world_size)])
    now = run.strategy.processes.size, run.strategy.data_processes.size
    return [] if now == (manifest.world_size, len(saved)) else saved


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
