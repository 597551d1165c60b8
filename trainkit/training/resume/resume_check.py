"""Whether a run can take what was read from a checkpoint: looked at before any of it is applied."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainkit.checkpoint import Checkpoint
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.format.value_checks import (
    Unfit,
    anything,
    each,
    flag,
    listed,
    maybe,
    must_be,
    number,
    one_of,
    record,
    row,
    tensor,
    text,
    whole,
    within,
)
from trainkit.checkpoint.forms import (
    SCALE,
    STREAM,
    STREAMS,
    blaming,
    check_optimizer_form,
    check_schedule_form,
    refuse,
)
from trainkit.checkpoint.training_state import check_rank_parts, same_torch
from trainkit.errors import CheckpointError
from trainkit.precision import FP16
from trainkit.training.logging import BY_PROCESS
from trainkit.training.resume.fingerprint import changes
from trainkit.training.run import Run
from trainkit.training.several.optimizers import COUNTERS, described
from trainkit.training.state import TrainState

__all__ = ["check_metadata", "check_model_form", "check_parts", "check_states"]


_METADATA = record(
    {
        "epoch": whole,
        "metrics": each(number),
        "config": record({"max_epochs": maybe(whole), "max_steps": maybe(whole)}),
        "planned_steps": maybe(whole),
        "fingerprint": record(
            {
                "parameters": each(listed(whole)),
                "layouts": each(listed(whole)),
                "optimizer": text,
                "optimizer groups": listed(listed(text)),
                "added parameters": each(flag),
                "scheduler": maybe(text),
                "scheduler advances": maybe(text),
                "precision": text,
                "data set length": maybe(whole),
                "global batch": maybe(whole),
                "seed": must_be("a whole number", lambda v: type(v) is int),
                "training loaders": maybe(text),
            },
            # Older ones have none.
            optional={"layouts", "added parameters", "scheduler advances", "training loaders"},
        ),
        "versions": each(text),
        "order": record({"facts": each(anything), "digest": maybe(text)}),
        "hparams": each(anything),
        "reference": record({"source": text, "digests": each(text)}),
    },
    optional={"hparams", "order", "reference", "versions"},
)
_DATA = each(STREAM)
_OPTIMIZER = record(
    dict.fromkeys(COUNTERS, whole) | {"precision": anything, "weight_reference": anything},
    optional={"weight_reference"},  # older ones have it, and nothing reads it
    closed=True,
)
_OPTIMIZERS = record({"together": maybe(flag), "by_name": each(_OPTIMIZER)}, closed=True)
_TRAINER = record(
    {
        "counters": record(dict.fromkeys(TrainState().state_dict(), whole), closed=True),
        "lr_scheduler": anything,
        "precision": anything,
        "metrics": each(number),
        "best_metrics": each(number),
        "last_logged_step": whole,
        "last_evaluated_attempt": must_be(
            "a whole number from -1 on", lambda v: type(v) is int and v >= -1
        ),
        "callbacks": each(anything),
        "objects": each(anything),
        "optimizer_states": whole,
        "data": _DATA,
        "optimizers": _OPTIMIZERS,
    },
    optional={"optimizer_states", "data", "optimizers"},  # older ones, or one optimizer, have none
)
_SUM = row(one_of("mean", BY_PROCESS, "sum", "max", "last"), number, number)
_PROCESS = record(
    {
        **STREAMS,
        "log_sums": each(_SUM),
        "callbacks": each(anything),
        "objects": each(anything),
        "model": each(anything),
        "data": _DATA,
    },
    optional={"callbacks", "objects", "model", "data"},  # older ones have none
)


def check_metadata(checkpoint: Checkpoint) -> None:
    """Check the manifest, and that the parts are there that every checkpoint of a run has."""
    if not checkpoint.manifest.is_resumable:
        raise CheckpointError(
            f"`{checkpoint.path}` holds the weights alone, without optimizer and counters: no "
            'training can go on from it. Pass `resume="auto"` for the newest that has them, or '
            "begin a new training, with `load_checkpoint_in_model(model, path)` before it.",
            path=checkpoint.path,
        )
    with blaming(checkpoint, None):
        names = checkpoint.names()
        missing = [name for name in ("model", "optimizer", "trainer") if name not in names]
        if missing:
            raise Unfit(f"has no part {missing[0]!r}", "files")
        within(_METADATA, checkpoint.manifest.metadata, "metadata")
    check_rank_parts(checkpoint)


def check_parts(
    run: Run,
    checkpoint: Checkpoint,
    model: Any,
    optimizer: Any,
    trainer: Any,
    ranks: Mapping[int, Any],
) -> None:
    """Check all that a run takes by itself."""
    with blaming(checkpoint, "trainer"):
        _check_trainer(run, checkpoint, trainer)
    told = checkpoint.manifest.metadata["fingerprint"]
    check_model_form(checkpoint, "model", model, run.module)
    with blaming(checkpoint, "model"):
        for name, shape in told["parameters"].items():
            value = model.get(name)
            if name in model and isinstance(value, Tensor) and list(value.shape) != list(shape):
                raise Unfit(f"has the shape {list(value.shape)}, not {list(shape)}", name)
    parameters = dict(run.module.named_parameters())
    with blaming(checkpoint, "optimizer"):
        strict = same_torch(checkpoint)
        check_optimizer_form(optimizer, run.optimizer, parameters, strict=strict)
        if [group["params"] for group in optimizer["groups"]] != told["optimizer groups"]:
            raise Unfit("holds other parameters than the manifest tells", "groups")
        count = trainer.get("optimizer_states", len(optimizer["state"]))
        if count != len(optimizer["state"]):
            raise Unfit(f"is of {len(optimizer['state'])} parameters, not of {count}", "state")
    for rank, part in ranks.items():
        with blaming(checkpoint, process_part(rank)):
            _PROCESS(part)


def _check_trainer(run: Run, checkpoint: Checkpoint, trainer: Any) -> None:
    """Check counters, also against the manifest and each other, and the states of plug-ins."""
    _TRAINER(trainer)
    counters, manifest = trainer["counters"], checkpoint.manifest
    told, fingerprint = manifest.metadata, manifest.metadata["fingerprint"]
    for name, value in {"step": manifest.step, "epoch": told["epoch"]}.items():
        if counters[name] != value:
            raise Unfit(f"is {counters[name]}, but {value} in the manifest", "counters", name)
    attempts, position = counters["step"] + counters["skipped_steps"], counters["epoch_samples"]
    for value, limit, *keys in (
        (counters["consecutive_skips"], counters["skipped_steps"], "counters", "consecutive_skips"),
        (position, counters["samples_seen"], "counters", "epoch_samples"),
        (trainer["last_logged_step"], counters["step"], "last_logged_step"),
        (trainer["last_evaluated_attempt"], attempts, "last_evaluated_attempt"),
    ):
        if value > limit:
            raise Unfit(f"is {value}, more than {limit} can be", *keys)
    length, batch = fingerprint["data set length"], fingerprint["global batch"]
    if run.train_loader.order_facts().get("data") == "map-style" and length and batch:
        ends = position >= length and not counters["epoch"]  # later ones may grow
        if position % batch or ends:
            why = f"is {position}, where no step of {batch} of {length} samples begins"
            raise Unfit(why, "counters", "epoch_samples")
    _check_plugins(run, trainer, fingerprint, strict=same_torch(checkpoint))


def _check_plugins(
    run: Run, trainer: Mapping[str, Any], fingerprint: Mapping[str, Any], *, strict: bool
) -> None:
    """Check the states of the scheduler and of the precision."""
    scheduler, saved, named = run.lr_schedule, trainer["lr_scheduler"], fingerprint["scheduler"]
    if (saved is None) != (named is None):
        raise Unfit(f"must be that of {named}", "lr_scheduler")
    if scheduler is not None and scheduler.kind == named:
        check = partial(check_schedule_form, scheduler=scheduler.scheduler, strict=strict)
        within(check, saved, "lr_scheduler")
    if isinstance(run.precision, FP16) and fingerprint["precision"] == "fp16":
        scale = SCALE
    else:
        scale = anything if run.precision.state_dict() else record({}, closed=True)
    within(scale, trainer["precision"], "precision")
    if run.optimizers and described(run.optimizer) == fingerprint["optimizer"]:
        by_name = record(dict.fromkeys(run.optimizers, record({"precision": scale})), closed=True)
        record({"optimizers": record({"by_name": by_name})})(trainer)


def check_model_form(checkpoint: Checkpoint, part: str, saved: Any, module: nn.Module) -> None:
    """Check that a part holds tensors of the dtypes of a model, where that has tensors."""
    state = {name: v for name, v in module.state_dict().items() if isinstance(v, Tensor)}
    with blaming(checkpoint, part):
        record({})(saved)
        present = {name: value.dtype for name, value in state.items() if name in saved}
        record(dict.fromkeys(present, tensor))(saved)
    dtypes = {name: saved[name].dtype for name in present}
    refuse(checkpoint.path, changes("entry of the model's state", "dtype", dtypes, present))


def check_states(
    run: Run,
    owners: Mapping[str, Mapping[str, Any]],
    checkpoint: Checkpoint,
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    """Let callbacks and registered objects look at their states, by `check_state_dict`."""
    for kind in owners:
        for name, state in states[kind].items():
            check = getattr(owners[kind][name], "check_state_dict", None)
            if check is None:
                continue
            arguments = (run, state) if kind == "callbacks" else (state,)
            with blaming(checkpoint, "trainer"):
                try:
                    check(*arguments)
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
