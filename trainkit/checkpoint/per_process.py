"""States that are not alike on all processes: how they are found, and how they come back.

An owner is a callback or an object with `state_dict` and `load_state_dict`. It may say by an
attribute `per_process` whether its state differs by process; else the states are compared at each
save (DESIGN 2.22).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from trainkit.checkpoint import codec, strict_json
from trainkit.checkpoint.sharding import split
from trainkit.errors import CheckpointError

__all__ = ["States", "divide", "mark", "of_this_process"]

States = dict[str, Any]
"""States by the names of their owners."""

_ALIKE, _OWN = "alike", "own"


def mark(owner: Any, state: Any, path: str, *, alone: bool) -> str:
    """Return what the processes compare of a state: its digest, or what its owner says of it.

    Args:
        owner: Whose state it is.
        state: What its `state_dict` returned.
        path: Names it in errors, such as `callbacks.Mine`.
        alone: Whether there is nothing to compare it with.

    Raises:
        CheckpointError: The state cannot be saved, or not so.
    """
    said = getattr(owner, "per_process", None)
    if said is False or (alone and not said):
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
    digest = xxhash.xxh3_128(strict_json.dump([encoded.tree, shapes]))
    for piece in pieces.values():
        digest.update(piece.data())
    return f"sharded {shards} {digest.hexdigest()}" if encoded.is_sharded else digest.hexdigest()


def divide(kind: str, states: States, marks: Sequence[Mapping[str, str]]) -> tuple[States, States]:
    """Return the states that process 0 saves for all, and those that each process saves itself.

    Args:
        kind: What the owners are called in errors.
        states: Those of this process.
        marks: The marks of each process, by name. What only some processes have is their own.

    Raises:
        CheckpointError: A state holds sharded tensors, and the rest of it differs; on all.
    """
    alike: States = {}
    own: States = {}
    for name in dict.fromkeys(name for of_process in marks for name in of_process):
        found = [of_process.get(name, _OWN) for of_process in marks]
        differs = len(set(found)) > 1
        shards = {text.rpartition(" ")[0] for text in found}
        if len(shards) > 1:  # other sharded tensors, which is refused where they are saved
            differs = False
        elif differs and shards != {""}:
            raise CheckpointError(
                f"The {kind} `{name}` holds sharded tensors, which the processes save together, "
                "and beside them values that differ between the processes. Set `per_process = "
                "False` on it if those of process 0 speak for all, or keep them in an object of "
                "their own."
            )
        if name in states:
            (own if differs or found[0] == _OWN else alike)[name] = states[name]
    return alike, own


def of_this_process(
    kind: str,
    owners: Mapping[str, Any],
    common: States,
    parts: Sequence[States],
    *,
    rank: int,
    same_size: bool,
) -> tuple[States, list[str]]:
    """Return the states that this process takes from a checkpoint, and what is in the way.

    Args:
        kind: What the owners are called in errors.
        owners: The owners of this process.
        common: What process 0 saved for all.
        parts: What each process saved; only that of this process where `same_size`.
        rank: Which process this is.
        same_size: Whether as many processes saved it.
    """
    saved = {
        name: [part[name] for part in (common, *parts) if name in part]
        for name in dict.fromkeys(name for part in (common, *parts) for name in part)
    }
    # What only some processes had, only some need to have now.
    shared = {n for n in saved if n in common or same_size or len(saved[n]) == len(parts)}
    extra = sorted(set(saved if rank == 0 else shared) - set(owners))
    missing = sorted(set(owners) - set(saved))
    problems: list[str] = []
    if extra:
        problems.append(f"{kind}s in the checkpoint that the run does not have: {extra}")
    if missing:
        problems.append(f"{kind}s of the run that the checkpoint does not have: {missing}")
    states: States = {}
    for name in [name for name in saved if name in owners]:
        owner, found = owners[name], saved[name]
        merge = getattr(owner, "merge_state_dicts", None)
        if name in common or same_size:
            states[name] = found[0]
        elif merge is not None:
            states[name] = _merged(kind, name, merge, found)
        elif getattr(owner, "per_process", None) is False:
            states[name] = found[0]
        else:
            problems.append(_not_alike(kind, name, len(parts)))
    return states, problems


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


def _not_alike(kind: str, name: str, size: int) -> str:
    return (
        f"the state of the {kind} `{name}` differed between the {size} processes that saved it. "
        f"Resume on {size} processes; or give it `merge_state_dicts(states)`, which returns one "
        "state for those of all; or set `per_process = False` on it: that of process 0 is for all"
    )
