"""Whether what was read of a saved state can be loaded: looked at before any of it is applied."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerator.preparer import Registry
from trainkit.checkpoint import Checkpoint
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.format.schema import (
    Unfit,
    each,
    flag,
    listed,
    maybe,
    record,
    row,
    tensor_like,
    text,
    whole,
    within,
)
from trainkit.checkpoint.forms import (
    SCALE,
    STREAM,
    STREAMS,
    anything,
    blaming,
    check_optimizer_form,
    check_schedule_form,
    torch_state,
)
from trainkit.errors import CheckpointError
from trainkit.export.state import shapes_in, shapes_of

__all__ = ["check_form", "check_loop", "check_model", "check_parts"]

_GENERATORS = dict.fromkeys(
    ("generators", "generators_inside", "generators_after"), listed(torch_state)
)
_HOST = row(STREAMS["python"], STREAMS["numpy"], STREAMS["torch"])
_ORDER = {"host": _HOST, **_GENERATORS, "epoch": whole, "runs": whole}
_LOADER = record(
    {
        "epoch": whole,
        "batches": whole,
        "has_ended": flag,
        "order": maybe(record(_ORDER, optional={"epoch", "runs"})),  # older states have none
        "facts": each(anything),
        "digest": maybe(text),
        "stream": STREAM,
    },
    optional={"facts", "digest", "stream"},  # older states have none
)
_WINDOWS = record({"count": whole, "in_window": whole, "divisor": whole})
_LOOP = record(
    {
        "schedulers": listed(anything),
        "loaders": listed(_LOADER),
        "scaler": record({}),
        "accumulation": _WINDOWS,
    }
)
_PROCESS = {
    **STREAMS,
    "gradients": each(anything),
    "loaders": listed(_LOADER),
    "accumulation": _WINDOWS,
    "objects": each(anything),
}


def check_form(
    checkpoint: Checkpoint,
    found: Mapping[str, Any],
    own: Sequence[Any],
    registry: Registry,
    models: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, Tensor],
    *,
    rank: int | None,
    has_scaler: bool,
) -> None:
    """Check all that `load_state` takes by itself.

    Args:
        checkpoint: What it was read from.
        found: The parts for all processes.
        own: The parts of processes, that of this one alone where as many saved it.
        registry: What is prepared.
        models: The present states of the models that are loaded, by their parts.
        parameters: The parameters by their names in states of optimizers.
        rank: Which process this is; None where another number of processes saved it.
        has_scaler: Whether losses are scaled now.

    Raises:
        CheckpointCorrupt: Something is not what `save_state` writes; names file and key.
    """
    strict = checkpoint.manifest.metadata.get("versions", {}).get("torch") == torch.__version__
    for name, present in models.items():
        with blaming(checkpoint, name):
            table = {
                key: _kind(value)
                for key, value in present.items()
                if isinstance(value, Tensor) and key in found[name]
            }
            record(table)(found[name])
    for index, optimizer in enumerate(registry.optimizers):
        name = "optimizer" if index == 0 else f"optimizer_{index}"
        with blaming(checkpoint, name):
            check_optimizer_form(found[name], optimizer.optimizer, parameters, strict=strict)
    with blaming(checkpoint, "loop"):
        _check_loop_form(found["loop"], registry, strict=strict, has_scaler=has_scaler)
    check = record(
        _PROCESS | dict.fromkeys(models, each(anything)),
        optional={"loaders", "accumulation", "objects", *models},
    )
    for index, part in enumerate(own, rank or 0):
        with blaming(checkpoint, process_part(index)):
            check(part)
            gradients = {name: _kind(parameters.get(name)) for name in part["gradients"]}
            within("gradients", record(gradients), part["gradients"])
            if rank is not None:  # else no pass is gone on with
                _check_generators(part.get("loaders", found["loop"]["loaders"]), registry)


def _check_loop_form(loop: Any, registry: Registry, *, strict: bool, has_scaler: bool) -> None:
    _LOOP(loop)
    if has_scaler and loop["scaler"]:
        within("scaler", SCALE, loop["scaler"])
    pairs = zip(registry.schedulers, loop["schedulers"], strict=False)
    for index, (scheduler, state) in enumerate(pairs):
        try:
            check_schedule_form(state, scheduler.scheduler, strict=strict)
        except Unfit as error:
            raise Unfit(error.why, "schedulers", index, *error.keys) from None


def _check_generators(states: Sequence[Any], registry: Registry) -> None:
    for index, (loader, state) in enumerate(zip(registry.loaders, states, strict=False)):
        present = loader.state_dict()
        if "generators" not in present:
            continue
        generators = row(*[torch_state] * len(present["generators"]))
        of_order = record(dict.fromkeys(_GENERATORS, generators))
        check = record({"generators": generators, "order": maybe(of_order)})
        try:
            check(state)
        except Unfit as error:
            raise Unfit(error.why, "loaders", index, *error.keys) from None


def _kind(present: Any) -> Any:
    """Return the check of a tensor that is to have the type of another; shapes are told apart."""

    def check(value: Any) -> None:
        if not isinstance(value, Tensor):
            raise Unfit(f"must be a tensor, but is {value!r:.60}")
        if not isinstance(present, Tensor):
            raise Unfit("belongs to no parameter")
        tensor_like(torch.empty(value.shape, dtype=present.dtype, device="meta"))(value)

    return check


def check_parts(path: Path, names: set[str], expected: set[str], unsaved: set[str]) -> None:
    """Raise CheckpointError where a state is of other things than are prepared."""
    missing, unknown = sorted(expected - names - unsaved), sorted(names - expected)
    if missing or unknown:
        raise CheckpointError(
            f"The state `{path}` does not fit: it lacks {missing or 'nothing'}, and has "
            f"{unknown or 'nothing'} that is not wanted. Prepare and register as many models, "
            "optimizers and objects as when it was saved.",
            path=path,
        )


def check_model(path: Path, part: str, saved: Mapping[str, Any], model: nn.Module) -> None:
    """Raise CheckpointError where a state is not that of a model."""
    expected = shapes_of(model, saved)
    shapes = shapes_in(saved, expected)
    problems = [f"lacks {name!r}" for name in expected if name not in saved]
    problems += [f"has {name!r} too many" for name in saved if name not in expected]
    problems += [
        f"has {name!r} of shape {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if name in saved and shapes[name] != shape
    ]
    if problems:
        raise CheckpointError(
            f"The state `{path}` does not fit: its {part} {'; '.join(problems[:5])}.", path=path
        )


def check_loop(
    path: Path, loop: Mapping[str, Any], registry: Registry, streams: Mapping[str, Any] | None
) -> None:
    """Raise CheckpointError where the schedulers or loaders of a state are not those prepared."""
    for kind, things in (("schedulers", registry.schedulers), ("loaders", registry.loaders)):
        if len(loop[kind]) != len(things):
            raise CheckpointError(
                f"The state `{path}` does not fit: it has {len(loop[kind])} {kind}, but "
                f"{len(things)} are prepared. Prepare as many as when it was saved.",
                path=path,
            )
    states = {**loop, **(streams or {})}["loaders"]
    for index, (loader, state) in enumerate(zip(registry.loaders, states, strict=True)):
        goes_on = streams is not None  # else every pass begins anew
        problems = loader.unfit(state) if goes_on else []
        if problems:
            raise CheckpointError(
                f"The state `{path}` was saved inside a pass of the loader {index}, which goes on "
                f"in another order: {'; '.join(problems)}. Prepare the same loader, or load a "
                "state that was saved between two passes.",
                path=path,
            )
        if not (goes_on and state["batches"] and not state["has_ended"]):
            why = loader.come_to(state, registry.objects)
            if why:
                raise CheckpointError(
                    f"The state `{path}` does not fit the loader {index}: {why}.", path=path
                )
