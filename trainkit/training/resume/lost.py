"""Why a checkpoint does not hold a value that training may go on with (rule 22)."""

from collections import deque
from collections.abc import Callable
from io import IOBase
from typing import Any

from trainkit.training.resume.values import is_large_of_graph

GREW = (
    "has changed since training began, and no checkpoint holds lists and dicts of data sets, as "
    "caches and records are: a resume begins with what is given to it. If training goes on with it "
    "(a replay buffer), register an object whose `state_dict` gives it."
)
"""Of a container of a data set."""


def why_lost(
    value: Any, was_held: bool, is_data: bool, is_shard_of_its_own: Callable[[Any], bool]
) -> str:
    """Return what is to be said of a value that is not saved; nothing of most.

    Args:
        was_held: Whether it was saved before, or would have been.
        is_data: Whether a data set holds it, or a loader.
        is_shard_of_its_own: Whether a value is a shard, and none of the model's.
    """
    kind, why = type(value), ""
    if was_held and issubclass(kind, list | dict | set | deque):
        why = (
            "has become what no checkpoint holds: it is too large or deep (a callback's may "
            "have 1 MiB of tensors), or has other things than numbers, text and tensors in it. "
            "A resume begins with what is given to it."
        )
    if is_data:
        return why
    if hasattr(kind, "__next__") and not issubclass(kind, IOBase):
        why = (
            "is an iterator, and no checkpoint holds where that is: a resume begins with what "
            "is given to it. Let `fit` read such a loader (`Combined`), or register an object "
            "with a `state_dict` that draws from it."
        )
    inner = value if issubclass(kind, list | tuple) else (value,)
    inner = value.values() if issubclass(kind, dict) else inner
    if any(map(is_shard_of_its_own, inner)):
        why = (
            "holds a tensor that is sharded, which a checkpoint has of the model and its "
            "optimizers alone: a resume begins with what is given to it. Register an object "
            "whose `state_dict` gives it (`trainer.register_for_checkpointing`)."
        )
    if any(map(is_large_of_graph, inner)):
        why = (
            "is large and of a graph, and is not saved: a resume begins with what is given to "
            "it. If a step goes on with it, keep it detached (`.detach()`)."
        )
    return why
