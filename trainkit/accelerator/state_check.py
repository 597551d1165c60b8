"""Whether what was read of a saved state can be loaded: looked at before any of it is applied."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from trainkit.accelerator.preparer import Registry
from trainkit.checkpoint import Checkpoint
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.forms import fit, maybe
from trainkit.checkpoint.training_state import (
    SCALE,
    STREAM,
    STREAMS,
    check_optimizer,
    check_schedule,
    parameter_names,
    same_torch,
    torch_state,
)
from trainkit.training.resume.fingerprint import model_problems
from trainkit.training.resume.restore import check_model_form

__all__ = ["check_form", "part_name", "problems"]

_GENERATORS = ("generators", "generators_inside", "generators_after")
_HOST = (STREAMS["python"], STREAMS["numpy"], STREAMS["torch"])
_ORDER = {"host": _HOST, "epoch?": int, "runs?": int} | {key: [torch_state] for key in _GENERATORS}
_LOADER = {
    "epoch": int,
    "batches": int,
    "has_ended": bool,
    "order": maybe(_ORDER),
    "facts?": {str: Any},  # this and others that end so: not all have them
    "digest?": str | None,
    "stream?": STREAM,
    "generators?": [torch_state],
}
_WINDOWS = {"count": int, "in_window": int, "divisor": int}
_LOOP = {"schedulers": [Any], "loaders": [_LOADER], "scaler": {}, "accumulation": _WINDOWS}
_PROCESS = {
    **STREAMS,
    "gradients": {str: Tensor},
    "loaders?": [_LOADER],  # this and the next: older states have none
    "accumulation?": _WINDOWS,
}


def part_name(kind: str, index: int) -> str:
    """Return the part of a model or optimizer."""
    return kind if index == 0 else f"{kind}_{index}"


def check_form(
    checkpoint: Checkpoint,
    parts: Mapping[str, Any],
    ranks: Mapping[int, Any],
    registry: Registry,
    models: Mapping[str, nn.Module],
    parameters: Mapping[str, Tensor],
    *,
    goes_on: bool,
    scaled: bool,
) -> None:
    """Check all that `load_state` takes by itself.

    Args:
        models: The models that are loaded, by their parts.
        parameters: The parameters by their names in states of optimizers.
        goes_on: Whether passes of loaders go on where they were.
        scaled: Whether losses are scaled now.
    """
    strict = same_torch(checkpoint)
    for name, model in models.items():
        check_model_form(checkpoint, name, parts[name], model)
    for index, optimizer in enumerate(registry.optimizers):
        name = part_name("optimizer", index)
        with checkpoint.blaming(name):
            check_optimizer(parts[name], optimizer.optimizer, parameters, strict=strict)
    with checkpoint.blaming("loop"):
        loop = parts["loop"]
        fit(loop, _LOOP)
        if scaled and loop["scaler"]:
            fit(loop["scaler"], SCALE, "scaler")
        pairs = zip(registry.schedulers, loop["schedulers"], strict=False)
        for index, (scheduler, state) in enumerate(pairs):
            check = partial(check_schedule, scheduler=scheduler.scheduler, strict=strict)
            fit(state, check, "schedulers", index)
    of_process = _PROCESS | {f"{name}?": {str: Any} for name in ("objects", *models)}
    for rank, part in ranks.items():
        with checkpoint.blaming(process_part(rank)):
            fit(part, of_process)
            if goes_on:
                _check_generators(part.get("loaders", loop["loaders"]), registry)


def _check_generators(states: Sequence[Any], registry: Registry) -> None:
    for index, (loader, state) in enumerate(zip(registry.loaders, states, strict=False)):
        present = loader.state_dict()
        if "generators" not in present:
            continue
        generators = (torch_state,) * len(present["generators"])
        order = state["order"] or {}
        # A pass that other processes began has as many as there.
        began = (torch_state,) * len(order.get("generators", ()))
        form = {"generators": generators, "order": maybe(dict.fromkeys(_GENERATORS, began))}
        fit(state, form, "loaders", index)


def problems(
    parts: Mapping[str, Any],
    registry: Registry,
    models: Mapping[str, nn.Module],
    parameters: Mapping[str, Tensor],
    streams: Mapping[str, Any] | None,
) -> list[str]:
    """Return, in words, why a state is not that of what is prepared.

    Args:
        parts: The parts for all processes, in their form.
        models: The models that are loaded, by their parts.
        parameters: The parameters by their names in states of optimizers.
        streams: The part of this process; None: every pass begins anew.
    """
    found = [
        f"its {name}: {problem}"
        for name, model in models.items()
        for problem in model_problems(parts[name], model)
    ]
    for index, optimizer in enumerate(registry.optimizers):
        saved = [group["params"] for group in parts[part_name("optimizer", index)]["groups"]]
        names = parameter_names(optimizer.optimizer, parameters)
        groups = optimizer.optimizer.param_groups
        present = [[names[id(p)] for p in group["params"]] for group in groups]
        if saved != present:
            found.append(
                f"its optimizer is over {_shown(saved)}, but here it is over {_shown(present)}. "
                "Make the optimizers as when it was saved"
            )
    kinds = {name: (value.shape, value.dtype) for name, value in parameters.items()}
    found += [
        f"its open gradient of `{name}` is that of another parameter"
        for name, value in (streams or {}).get("gradients", {}).items()
        if (value.shape, value.dtype) != kinds.get(name)
    ]
    return found + _loop_problems(parts["loop"], registry, streams)


def _shown(groups: list[list[str]]) -> str:
    names = [name for group in groups for name in group]
    listed = ", ".join(f"`{name}`" for name in names[:3])
    return f"{len(names)} parameters in {len(groups)} groups ({listed}, ...)"


def _loop_problems(
    loop: Mapping[str, Any], registry: Registry, streams: Mapping[str, Any] | None
) -> list[str]:
    counts = {"schedulers": len(registry.schedulers), "loaders": len(registry.loaders)}
    found = [
        f"it has {len(loop[kind])} {kind}, but {count} are prepared. Prepare as many as when it "
        "was saved"
        for kind, count in counts.items()
        if len(loop[kind]) != count
    ]
    states = {**loop, **(streams or {})}["loaders"]
    for index, (loader, state) in enumerate(zip(registry.loaders, states, strict=False)):
        inside = streams is not None and state["batches"] and not state["has_ended"]
        changed = loader.unfit(state) if inside else []
        if changed:
            found.append(
                f"it was saved inside a pass of the loader {index}, which goes on in another "
                f"order: {'; '.join(changed)}. Prepare the same loader, or load a state that was "
                "saved between two passes"
            )
        if not inside and (why := loader.come_to(state, registry.objects)):
            found.append(f"the loader {index}: {why}")
    return found
