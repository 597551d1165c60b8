"""What may differ by process of a state: registered objects, parts of models (rule 22)."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.checkpoint.per_process import of_this_process, put_own, take_divided
from trainkit.distributed import Processes
from trainkit.errors import CheckpointError, ConfigError
from trainkit.types import Stateful

__all__ = ["check_registered", "object_parts", "objects_for", "put_entries", "take_own"]

_OBJECT = "custom_checkpoint_"
_OBJECTS = "objects"


def check_registered(objects: Sequence[Any]) -> None:
    """Raise ConfigError where an object has no `state_dict` and `load_state_dict`."""
    for thing in objects:
        if not isinstance(thing, Stateful):
            raise ConfigError(
                f"A `{type(thing).__name__}` cannot be registered for checkpointing: it has "
                "no `state_dict` and `load_state_dict`. Give it both."
            )


def object_parts(names: Sequence[str]) -> set[str]:
    """Return which parts of a checkpoint are states of registered objects."""
    return {name for name in names if name.startswith(_OBJECT) and "-shard-" not in name}


def take_own(
    objects: Sequence[Any], models: Mapping[str, Any], processes: Processes | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the states of objects that are alike on all processes, and what is this process's own.

    Args:
        objects: What was registered.
        models: The states of models by their parts. What in them is no tensor may differ.
        processes: Those to compare with, which all call it; None: this process speaks for all.
    """
    owners = {_OBJECTS: _named(objects)}

    def take() -> dict[str, Any]:
        states = {name: thing.state_dict() for name, thing in owners[_OBJECTS].items()}
        return {_OBJECTS: states} | {
            part: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for part, state in models.items()
        }

    if processes is None:
        return take()[_OBJECTS], {}
    words = dict.fromkeys(models, "entry of the model's state") | {_OBJECTS: "object"}
    alike, own = take_divided(processes, words, owners, take)
    return alike[_OBJECTS], own


def put_entries(
    found: Mapping[str, Any], models: Collection[str], own: Sequence[Any], *, same_size: bool
) -> list[str]:
    """Put what of the models' states this process saved itself in its place; return what to say."""
    return [put_own(found[name], name, own, same_size=same_size) for name in sorted(models)]


def objects_for(
    objects: Sequence[Any],
    common: Mapping[str, Any],
    own: Sequence[Mapping[str, Any]],
    *,
    path: Path,
    rank: int,
    same_size: bool,
) -> dict[str, Any]:
    """Return the states of the registered objects on this process, in their order.

    Args:
        objects: What is registered now.
        common: The parts of a checkpoint.
        own: What each process saved itself; only that of this process where `same_size`.
        path: The checkpoint, for errors.
        rank: Which process this is.
        same_size: Whether as many processes saved it.

    Raises:
        CheckpointError: They do not fit.
    """
    names = object_parts(list(common))
    states, problems = of_this_process(
        "object",
        _named(objects),
        {name: common[name] for name in common if name in names},
        [of_process.get(_OBJECTS, {}) for of_process in own],  # older states have none
        rank=rank,
        same_size=same_size,
    )
    if problems:
        raise CheckpointError(
            f"The state `{path}` does not fit: {'; '.join(problems)}. Prepare and register as many "
            "models, optimizers and objects as when it was saved.",
            path=path,
        )
    return {name: states[name] for name in _named(objects)}


def _named(objects: Sequence[Any]) -> dict[str, Any]:
    return {f"{_OBJECT}{index}": thing for index, thing in enumerate(objects)}
