"""Callbacks and registered objects whose state is in a checkpoint, and which process saves it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainkit.training.callback import Callback, CallbackList
from trainkit.training.run import Run

__all__ = ["owners_of", "states_for", "take_states"]

_KINDS = {"callbacks": "callback", "objects": "registered object", "data": "iterable data set"}
"""What has a state of its own, by its key in a checkpoint, and in words."""

_MODEL = "model"

States = dict[str, dict[str, Any]]
"""States by kind and name."""


def owners_of(run: Run, callbacks: CallbackList) -> States:
    """Return what has a state of its own, by kind and name."""
    stateful = {c.name: c for c in callbacks.callbacks if _has_state(c)}
    stream = run.train_loader.stream
    data = {} if stream is None else {"train": stream}
    return dict(zip(_KINDS, (stateful, dict(run.objects), data), strict=True))


def take_states(
    run: Run, callbacks: CallbackList, first: Callable[[], dict[str, Any]]
) -> tuple[States, States]:
    """Return the states that process 0 saves for all, and those that this process saves itself.

    Every process must call it.

    Args:
        run: Whose objects are saved.
        callbacks: Which are saved.
        first: Called before, where its error is told to all as well. Returns what of the model's
            state may differ by process; what does is saved by each process under "model".
    """
    from trainkit.checkpoint.per_process import take_divided  # other runs need none of it

    owners = owners_of(run, callbacks)

    def take() -> States:
        entries = first()
        states = {k: {n: o.state_dict() for n, o in owners[k].items()} for k in owners}
        return {_MODEL: entries, **states}

    words = {**_KINDS, _MODEL: "entry of the model's state"}
    alike, own = take_divided(run.strategy.processes, words, owners, take)
    return {kind: alike[kind] for kind in _KINDS}, own


def states_for(
    run: Run,
    callbacks: CallbackList,
    common: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    *,
    same_size: bool,
) -> tuple[States, list[str]]:
    """Return the states that this process takes from a checkpoint, and what is in the way."""
    from trainkit.checkpoint.per_process import of_this_process

    states: States = {}
    problems: list[str] = []
    for kind, owners in owners_of(run, callbacks).items():
        if kind not in common:  # older checkpoints know of no data sets
            states[kind] = {}
            continue
        states[kind], found = of_this_process(
            _KINDS[kind],
            owners,
            common[kind],
            [part.get(kind, {}) for part in parts],  # older ones have none
            rank=run.processes.process_index,
            same_size=same_size,
        )
        problems += found
    return states, problems


def _has_state(callback: Callback) -> bool:
    own = getattr(callback.state_dict, "__func__", None)
    return own is not Callback.state_dict
