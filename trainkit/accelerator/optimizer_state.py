"""The state of an optimizer with its parameters called by their names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from trainkit.checkpoint.exact import load_optimizer, other_state, parameter_states
from trainkit.checkpoint.resharding.subclasses import put_parts, take_parts
from trainkit.errors import CheckpointError

__all__ = ["by_name", "check_optimizer", "load_by_name"]


def by_name(optimizer: Optimizer, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state.

    Args:
        optimizer: Any.
        parameters: The parameters by name; others are called by their place.
    """
    named = {id(parameter): name for name, parameter in parameters.items()}
    for place, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        named.setdefault(id(parameter), f"optimizer.{place}")
    groups = [
        {**group, "params": [named[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {named[id(p)]: dict(values) for p, values in parameter_states(optimizer).items()}
    return take_parts({"state": state, "groups": groups}) | other_state(optimizer)


def check_optimizer(
    path: Path, saved: Mapping[str, Any], optimizer: Optimizer, parameters: Mapping[str, Any]
) -> None:
    """Raise CheckpointError where a state is not that of these parameters, in this order."""
    order = [group["params"] for group in saved["groups"]]
    present = [group["params"] for group in by_name(optimizer, parameters)["groups"]]
    if order != present:
        raise CheckpointError(
            f"The state `{path}` does not fit: its optimizer is over {_shown(order)}, but here it "
            f"is over {_shown(present)}. Make the optimizers as when it was saved.",
            path=path,
        )


def load_by_name(
    optimizer: Optimizer, saved: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
    """Put back what `by_name` returned.

    Args:
        parameters: By name, as they were saved, where that is known.
    """
    places: dict[str, int] = {}
    for group in saved["groups"]:
        for name in group["params"]:
            places[name] = len(places)
    groups = [{**g, "params": [places[name] for name in g["params"]]} for g in saved["groups"]]
    state = {places[name]: values for name, values in saved["state"].items()}
    was = [parameters.get(name) for name in places]
    load_optimizer(optimizer, {"state": state, "param_groups": groups}, was, saved.get("other"))
    present = [p for group in optimizer.param_groups for p in group["params"]]
    put_parts(optimizer, saved, dict(zip(places, present, strict=True)))


def _shown(groups: list[list[str]]) -> str:
    names = [name for group in groups for name in group]
    listed = ", ".join(f"`{name}`" for name in names[:3])
    return f"{len(names)} parameters in {len(groups)} groups ({listed}, ...)"
