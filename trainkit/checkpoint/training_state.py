"""The state of a training as both faces save it: what each process has, optimizers, versions.

And whether a state that was read is one: looked at before anything of it is applied.
"""

import inspect
import math
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.checkpoint import Checkpoint
from trainkit.checkpoint.exact import load_optimizer, other_state, parameter_states
from trainkit.checkpoint.format.names import process_part
from trainkit.checkpoint.forms import Unfit, check_form, finite, like, maybe, tensor_like
from trainkit.checkpoint.resharding.sharding import split_alike
from trainkit.checkpoint.resharding.subclasses import put_parts, take_parts
from trainkit.distributed import Processes
from trainkit.errors import CheckpointError
from trainkit.version import __version__


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


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError where there are problems: whole sentences without a full stop."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"The checkpoint `{path}` does not fit:\n{listed}", path=path)


@contextmanager
def applying(what: str, path: Path) -> Iterator[None]:
    """Say of an error of `load_state_dict` whose it is, and what has become of the training."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} refused its state of the checkpoint `{path}`: {type(error).__name__}: "
            f"{error}. Part of the checkpoint is applied already, so this model and optimizer "
            "cannot be used: make them anew.",
            path=path,
        ) from error


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
    with checkpoint.blaming(None):
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
    for index, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        names.setdefault(id(parameter), f"optimizer.{index}")
    return names


def named_optimizer_state(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state of an optimizer, its parameters called as in `parameter_names`."""
    names = parameter_names(optimizer, parameters)
    groups = [
        {**group, "params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    states, held = parameter_states(optimizer), {n for group in groups for n in group["params"]}
    if left := [[*p.shape] for p in states if names.get(id(p)) not in held]:
        raise CheckpointError(
            f"The optimizer holds a state for parameters of the shapes {left} that are in none of "
            "its groups, as of a layer that was replaced. Take it out together with the layer, by "
            "`optimizer.state.pop(parameter)`: no checkpoint, not torch's own either, can hold it."
        )
    state = {names[id(p)]: dict(values) for p, values in states.items()}
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
    numbers = {name: number for number, name in enumerate(order)}
    groups = [
        {**(present if keep_settings else group), "params": [numbers[n] for n in group["params"]]}
        for group, present in zip(saved["groups"], optimizer.param_groups, strict=True)
    ]
    state = {numbers[name]: values for name, values in saved["state"].items()}
    states = {"state": state, "param_groups": groups}
    load_optimizer(optimizer, states, [parameters.get(n) for n in order], saved.get("other"))
    present = (p for group in optimizer.param_groups for p in group["params"])
    put_parts(optimizer, saved, dict(zip(order, present, strict=True)))


def _taken(what: str, take: Callable[[Any], object]) -> Callable[[Any], None]:
    """A state of a generator, which `take` accepts."""

    def check(value: Any) -> None:
        try:
            take(value)
        except Exception as error:
            raise Unfit(f"is no state of {what} generator ({error})") from None

    return check


def _take_numpy(value: Any) -> None:
    import numpy

    _, keys, position, _, _ = value
    if not 0 <= position <= 624 or keys.shape != (624,):  # which NumPy does not look at
        raise ValueError("its position or its words are wrong")
    numpy.random.RandomState(0).set_state(value)


def _take_device(value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        raise ValueError("it is no row of bytes")


torch_state = _taken("torch's", lambda value: torch.Generator().set_state(value))

STREAMS: dict[str, Any] = {
    "python": _taken("Python's", lambda value: random.Random().setstate(value)),
    "numpy": maybe(_taken("NumPy's", _take_numpy)),
    "torch": torch_state,
    "device": maybe(_taken("a device's", _take_device)),
}
"""The random streams of a process."""

STREAM = {
    "shards": int,
    "inside": bool,
    # The batches are only those of epochs that are limited.
    "state": maybe({"items": int, "ended": bool, "before_last": Any, "batches?": int}),
    "first?": str | None,
}
"""The place in an iterable data set."""


def _scale(low: float, high: float) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        check_form(value, float)
        if not low < value < high:
            raise Unfit(f"must be between {low} and {high}, but is {value}")

    return check


SCALE = {
    "scale": _scale(0, math.inf),
    "growth_factor": _scale(1, math.inf),
    "backoff_factor": _scale(0, 1),
    "growth_interval": int,
    "_growth_tracker": int,
}
"""The scale of losses under fp16."""


def check_schedule(saved: Any, scheduler: Any, *, strict: bool, groups: float = math.inf) -> None:
    """Check the state of a scheduler of torch or trainkit; others know their own.

    Args:
        strict: Whether the same version of torch wrote it, which knows the same keys.
        groups: How many the optimizer had, some of which the run may have added.
    """
    if not type(scheduler).__module__.startswith(("torch.", "trainkit.")):
        return
    present = scheduler.state_dict()
    needed = present.keys() if strict else {"last_epoch"}
    check_form(saved, {k if k in needed else f"{k}?": _loosely(k, v) for k, v in present.items()})
    for key in saved:
        if callable(getattr(type(scheduler), str(key), None)):
            raise Unfit("is no state, but a method of the scheduler", key)
    for key in ("base_lrs", "_last_lr"):
        if key in saved and isinstance(present.get(key), list):
            check_form(saved[key], [_rate], key)
            if not len(present[key]) <= len(saved[key]) <= groups:
                raise Unfit(f"has {len(saved[key])} values for {groups} groups", key)


def _loosely(key: str, present: Any) -> Any:
    if key in ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter"):
        return int
    if isinstance(present, list) and present:
        plain = not isinstance(present[0], Mapping) and present[0] is not None
        form = like(present[0]) if plain else maybe({})
        return [form]
    if isinstance(present, Mapping):
        return {}
    return maybe(_rate) if present is None else like(present)


def _rate(value: Any) -> None:
    if not (isinstance(value, Tensor) and value.numel() == 1):
        finite(value)


_OPTIMIZER = {
    "state": {str: {str: Any}},
    "groups": [{"params": [str]}],
    "parts?": {str: {str: {str: Tensor}}},
    "other?": {"keys": {}, "state": {}},
}


def check_optimizer(
    saved: Any, optimizer: Optimizer, parameters: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Check what `named_optimizer_state` returned, of which optimizers of torch try each state.

    Args:
        strict: Whether the same version of torch wrote it, which knows the same keys.
    """
    check_form(saved, _OPTIMIZER)
    names = [name for group in saved["groups"] for name in group["params"]]
    if len(set(names)) != len(names):
        raise Unfit("has one parameter twice", "groups")
    for key in ("state", "parts"):
        unknown = [name for name in saved.get(key, {}) if name not in names]
        if unknown:
            raise Unfit("belongs to no group", key, unknown[0])
    if "training_weights" in saved:
        form = {name: tensor_like(parameters[name]) for name in names if name in parameters}
        check_form(saved["training_weights"], form, "training_weights")
    if not type(optimizer).__module__.startswith("torch.optim"):
        return  # what an option or a state of another one may become, only that one knows
    pairs = zip(saved["groups"], optimizer.param_groups, strict=False)
    for index, (group, present) in enumerate(pairs):
        options = {k: _option(v) for k, v in present.items() if k in (*optimizer.defaults, "lr")}
        check_form(
            group, options if strict else {f"{k}?": v for k, v in options.items()}, "groups", index
        )
        made: dict[Any, dict[str, Any]] = {}
        for name in group["params"]:
            parameter, state = parameters.get(name), saved["state"].get(name)
            if parameter is None or not state:
                continue
            kind = (parameter.dtype, parameter.ndim, parameter.device)
            if kind not in made:
                try:
                    made[kind] = _fresh_state(optimizer, group, *kind)
                except Exception as error:
                    if _can_step(optimizer, present, *kind):
                        why = f"is refused by `{type(optimizer).__name__}`: {error}"
                        raise Unfit(why, "groups", index) from None
                    made[kind] = {}
            form = {
                key if strict else f"{key}?": _form_of_state(key, value, parameter)
                for key, value in made[kind].items()
            }
            check_form(state, form, "state", name)


def _option(present: Any) -> Any:
    """Return the form of an option of a group; flags may be None, and what is None anything."""
    if isinstance(present, bool):
        return bool | None
    if present is None:
        return Any
    if isinstance(present, tuple | list):
        return tuple(Any if item is None else _rate for item in present)
    return _rate if isinstance(present, int | float | Tensor) else like(present)


def _fresh_state(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    ndim: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the state that an optimizer of the same class makes of a small parameter."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters.keys() - {"params"}
    chosen = {key: value for key, value in options.items() if key in accepted}
    if "lr" in optimizer.defaults:  # schedules make of it what they like
        chosen["lr"] = optimizer.defaults["lr"]
    small = nn.Parameter(torch.zeros((2,) * ndim, dtype=dtype, device=device))
    small.grad = torch.zeros_like(small)
    fresh = kind([small], **chosen)
    with torch.no_grad():
        fresh.step()
    return dict(fresh.state[small])


def _can_step(optimizer: Optimizer, *how: Any) -> bool:
    """Return whether an optimizer steps as here: some need sparse gradients, or more than that."""
    with suppress(Exception):
        _fresh_state(optimizer, *how)
        return True
    return False


def _form_of_state(key: str, fresh: Any, parameter: Tensor) -> Any:
    if key == "step":
        return _step
    if not isinstance(fresh, Tensor):
        return Any if fresh is None else _rate
    if fresh.shape == (2,) * parameter.ndim:
        return tensor_like(torch.empty(parameter.shape, dtype=fresh.dtype, device="meta"))
    return Tensor


def _step(value: Any) -> None:
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    finite(value)
    check_form(int(value), int)
