"""The state of a training as both faces save it: what each process has, optimizers, versions."""

import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainkit.checkpoint.checkpoint import Checkpoint
from trainkit.checkpoint.exact import load_optimizer, other_state, parameter_states
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.format.value_checks import Unfit
from trainkit.checkpoint.forms import blaming
from trainkit.checkpoint.resharding.sharding import split_alike
from trainkit.checkpoint.resharding.subclasses import put_parts, take_parts
from trainkit.distributed import Processes
from trainkit.version import __version__

__all__ = [
    "check_rank_parts",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "parameter_names",
    "parts_of_rank",
    "read_rank_parts",
    "same_torch",
    "versions",
]


def versions() -> dict[str, str]:
    """Return what stands in the manifest of the versions that a state was saved by."""
    return {
        "trainkit": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def same_torch(checkpoint: Checkpoint) -> bool:
    """Return whether the version of torch that is used now wrote a checkpoint."""
    saved = checkpoint.manifest.metadata.get("versions", {})
    return bool(saved.get("torch") == str(torch.__version__))


def parts_of_rank(
    processes: Processes, parts: Mapping[str, Any], own: Mapping[str, Any] | None, *, sharded: bool
) -> dict[str, Any]:
    """Return the parts of a checkpoint that this process writes.

    Where sharded, every process must call it.

    Args:
        parts: What all have alike, or hold together; process 0 writes it, all write their shards.
        own: What this process has for itself, which becomes a part of its own; None: no part.
        sharded: Whether there are tensors of which each process holds a shard.
    """
    mine = {} if own is None else {process_part(processes.rank): own}
    if sharded:
        return mine | split_alike(processes, parts)
    return {**mine, **parts} if processes.is_main else mine


def check_rank_parts(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointCorrupt` where there is not one part of each process that saved it."""
    size = checkpoint.manifest.world_size
    own = [n for n in checkpoint.names() if n.startswith("process-") and "-shard-" not in n]
    with blaming(checkpoint, None):
        if len(own) != size or own != list(map(process_part, range(size))):
            raise Unfit(f"is {size}, but there are {own}", "world_size")


def read_rank_parts(checkpoint: Checkpoint, processes: Processes, trained: int) -> dict[int, Any]:
    """Return what processes have saved for themselves, by their rank.

    It is that of this process alone where as many trained; else that of all that saved.

    Args:
        trained: How many processes trained; perhaps not all of them saved.
    """
    saved = range(checkpoint.manifest.world_size)
    wanted = range(processes.rank, processes.rank + 1) if trained == processes.size else saved
    return {rank: checkpoint.read(process_part(rank)) for rank in wanted if rank in saved}


def parameter_names(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[int, str]:
    """Return what the parameters of an optimizer are called in its state, by their identity.

    Those that are not in `parameters` are called by their place.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for place, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        names.setdefault(id(parameter), f"optimizer.{place}")
    return names


def named_optimizer_state(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of an optimizer, its parameters called as in `parameter_names`."""
    names = parameter_names(optimizer, parameters)
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[id(p)]: dict(values) for p, values in parameter_states(optimizer).items()}
    return take_parts({"state": state, "groups": groups}) | other_state(optimizer)


def load_named_optimizer_state(
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    parameters: Mapping[str, Any],
    *,
    keep_settings: bool = False,
) -> None:
    """Put back what `named_optimizer_state` returned.

    Args:
        optimizer: Has the same parameters in the same groups.
        parameters: By name, as they were saved, where that is known.
        keep_settings: The settings of the groups, such as learning rates, stay as they are.
    """
    order = [name for group in saved["groups"] for name in group["params"]]
    places = {name: place for place, name in enumerate(order)}
    groups = [
        {**(present if keep_settings else group), "params": [places[n] for n in group["params"]]}
        for group, present in zip(saved["groups"], optimizer.param_groups, strict=True)
    ]
    state = {places[name]: values for name, values in saved["state"].items()}
    states = {"state": state, "param_groups": groups}
    load_optimizer(optimizer, states, [parameters.get(n) for n in order], saved.get("other"))
    present = (p for group in optimizer.param_groups for p in group["params"])
    put_parts(optimizer, saved, dict(zip(order, present, strict=True)))
