"""States that are not alike on all processes: how they are found, and how they come back.

An owner is a callback or an object with `state_dict` and `load_state_dict`. It may say by an
attribute `per_process` whether its state differs by process; else the states are compared at each
save (rule 22).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from trainkit.checkpoint.format import codec, strict_json
from trainkit.checkpoint.io.digests import xxh3_128
from trainkit.checkpoint.resharding.sharding import split
from trainkit.distributed import Processes, run_on_all
from trainkit.distributed.collectives import are_alike, gather_on_main, number_of
from trainkit.errors import CheckpointError

Owners = Mapping[str, Mapping[str, Any]]
"""What has a state of its own, by kind and name."""

States = dict[str, Any]
"""States by the names of their owners."""

T = TypeVar("T")

_ALIKE, _OWN = "alike", "own"
_WORDS = {
    "callbacks": "callback",
    "objects": "registered object",
    "data": "iterable data set",
    "attributes": "record of attributes",
}
"""What an owner is called in errors, by kind; other kinds are models."""


def take_states(
    processes: Processes, owners: Owners, take: Callable[[], tuple[T, Mapping[str, States]]]
) -> tuple[T, dict[str, States], dict[str, States]]:
    """Return the states that process 0 saves for all, and those that this process saves itself.

    Every process must call it.

    Args:
        owners: Whose states are saved.
        take: Called first; its error is raised by all. Returns what is handed on, and what of the
            models' states may differ by process, by their parts.

    Returns:
        What `take` handed on; the owners' states that are alike, by kind; and what this process
        saves itself, by kind and by the models' parts.
    """

    def mark() -> tuple[tuple[T, dict[str, States]], dict[str, dict[str, str]]]:
        rest, models = take()
        states = {k: {n: o.state_dict() for n, o in own.items()} for k, own in owners.items()}
        states |= models
        marks = {
            kind: {
                name: _mark(owners.get(kind, {}).get(name), state, f"{kind}.{name}", processes)
                for name, state in of_kind.items()
            }
            for kind, of_kind in states.items()
        }
        return (rest, states), marks

    def decide(by_rank: Sequence[Mapping[str, Mapping[str, str]]]) -> dict[str, list[str]]:
        return {kind: _differing(kind, [marks[kind] for marks in by_rank]) for kind in states}

    (rest, states), marks = run_on_all(processes, mark)
    if are_alike(processes, number_of(marks)):
        differing = decide([marks])
    else:
        differing = gather_on_main(processes, marks, decide)
    own = {kind: {n: s for n, s in states[kind].items() if n in differing[kind]} for kind in states}
    alike = {kind: {n: s for n, s in states[kind].items() if n not in own[kind]} for kind in owners}
    return rest, alike, own


def _mark(owner: Any, state: Any, path: str, processes: Processes) -> str:
    """Return what the processes compare of a state: its digest, or what its owner says of it."""
    said = getattr(owner, "per_process", None)
    if said is False or (processes.size == 1 and not said):
        return _ALIKE
    parts, shards = split({path: state}, 0)
    encoded = codec.encode(parts[path], path)
    if said and encoded.is_sharded:
        raise CheckpointError(
            f"`{path}` says `per_process = True`, but its state holds sharded tensors, which the "
            "processes hold together. Keep them in an object of their own."
        )
    if said:
        return _OWN
    pieces = encoded.pieces
    shapes = {name: [piece.dtype, *piece.shape] for name, piece in pieces.items()}
    digest = xxh3_128(strict_json.dump([encoded.tree, shapes]))
    for piece in pieces.values():
        digest.update(piece.data())
    return f"sharded {shards} {digest.hexdigest()}" if encoded.is_sharded else digest.hexdigest()


def _differing(kind: str, marks: Sequence[Mapping[str, str]]) -> list[str]:
    """Return whose states each process saves itself, by the marks of each process.

    What only some processes have is their own.
    """
    own: list[str] = []
    for name in dict.fromkeys(name for of_process in marks for name in of_process):
        digests = [of_process.get(name, _OWN) for of_process in marks]
        differs = len(set(digests)) > 1
        shards = {text.rpartition(" ")[0] for text in digests}
        if len(shards) > 1:  # other sharded tensors, which is refused where they are saved
            differs = False
        elif differs and shards != {""}:
            raise CheckpointError(
                f"The {_word(kind)} `{name}` holds sharded tensors, which the processes save "
                "together, and beside them values that differ between the processes. Set "
                "`per_process = False` on it if those of process 0 speak for all, or keep them in "
                "an object of their own."
            )
        if differs or digests[0] == _OWN:
            own.append(name)
    return own


def states_for(
    owners: Owners,
    common: Mapping[str, States],
    parts: Sequence[Mapping[str, States]],
    *,
    rank: int,
    same_size: bool,
) -> tuple[dict[str, States], list[str]]:
    """Return the states that this process takes from a checkpoint, and what is in the way.

    Args:
        common: What process 0 saved for all, by kind.
        parts: What each process saved; only that of this process where `same_size`.
        same_size: Whether as many processes saved it.
    """
    states: dict[str, States] = {kind: {} for kind in owners}
    problems: list[str] = []
    for kind in [kind for kind in owners if kind in common]:  # older ones know of no data sets
        present, word = owners[kind], _word(kind)
        every = [common[kind], *(part.get(kind, {}) for part in parts)]  # older ones have no own
        saved = {n: [part[n] for part in every if n in part] for n in dict.fromkeys(chain(*every))}
        plain = {name for name in saved if name in common[kind] or same_size}
        # What only some processes had, only some need to have now.
        shared = {name for name in saved if name in plain or len(saved[name]) == len(parts)}
        if extra := sorted(set(saved if rank == 0 else shared) - set(present)):
            problems.append(f"{word}s in the checkpoint that the run does not have: {extra}")
        if missing := sorted(set(present) - set(saved)):
            problems.append(f"{word}s of the run that the checkpoint does not have: {missing}")
        for name in [name for name in saved if name in present]:
            merge = getattr(present[name], "merge_state_dicts", None)
            if name not in plain and merge is not None:
                states[kind][name] = _merged(word, name, merge, saved[name])
            elif name in plain or getattr(present[name], "per_process", None) is False:
                states[kind][name] = saved[name][0]
            else:
                size = len(parts)
                problems.append(
                    f"the state of the {word} `{name}` differed between the {size} processes that "
                    f"saved it. Resume on {size} processes; or give it "
                    "`merge_state_dicts(states)`, which returns one state for those of all; or set "
                    "`per_process = False` on it: that of process 0 is for all"
                )
    return states, problems


def _word(kind: str) -> str:
    return _WORDS.get(kind, "entry of the model's state")


def put_own(state: States, kind: str, parts: Sequence[States], *, same_size: bool) -> str:
    """Put the entries that this process saved itself in the place of process 0's.

    Returns what is to be said where another number of processes saved them. `kind` names them in
    the `parts` that processes saved.
    """
    own = parts[0].get(kind, {})  # older checkpoints have none
    if same_size:
        state.update({key: own[key] for key in own if key in state})
        return ""
    names = ", ".join(f"`{key}`" for key in own)
    told = "of the model differed between the processes that saved it; all take that of process 0."
    return f"{names} {told}" if names else ""


def _merged(kind: str, name: str, merge: Any, saved: list[Any]) -> Any:
    try:
        return merge(saved)
    except CheckpointError:  # says why itself
        raise
    except Exception as error:
        raise CheckpointError(
            f"`merge_state_dicts` of the {kind} `{name}` raised {type(error).__name__}: {error}. "
            "Nothing of the checkpoint was applied."
        ) from error
