"""Tensor subclasses in the state of an optimizer: saved by their parts, and put together again.

Quantized optimizers such as torchao's keep their moments in them. A subclass says what it is made
of by torch's `__tensor_flatten__`. No class is named in a file: at a resume the optimizer itself
makes a fresh state of each parameter, and what it has made there says which class it is.
"""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_KEY = "parts"
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def take_parts(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with tensor subclasses in a dict of parts.

    Args:
        optimizer_state: Has under "state" the values of each parameter by name; changed in place.
    """
    parts: dict[str, Any] = {}
    for name, values in optimizer_state["state"].items():
        for key in [key for key, value in values.items() if _has_parts(value)]:
            value: Any = values.pop(key)
            inner, _ = value.__tensor_flatten__()
            parts.setdefault(name, {})[key] = {one: getattr(value, one) for one in inner}
    return optimizer_state | ({_KEY: parts} if parts else {})


def put_parts(
    optimizer: "Optimizer", saved: Mapping[str, Any], parameters: Mapping[str, "Tensor"]
) -> None:
    """Put tensor subclasses back, after the rest of a state was loaded.

    Args:
        saved: What `take_parts` returned.
        parameters: By the names in it.
    """
    for name, values in saved.get(_KEY, {}).items():
        owner_of = getattr(optimizer, "owner_of", lambda _: optimizer)  # where there are several
        owner = owner_of(parameters[name])
        fresh = _fresh_state(owner, parameters[name])
        for key, parts in values.items():
            where = f"{name}.{key}"
            owner.state[parameters[name]][key] = _together(fresh.get(key), parts, where)


def _has_parts(value: Any) -> bool:
    import torch

    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) or is_sharded(value)
    if is_plain or not isinstance(value, torch.Tensor) or not hasattr(value, "__tensor_flatten__"):
        return False
    # Of sharded parts it is not known how they lie at a resume, so they are refused.
    return not any(is_sharded(getattr(value, name)) for name in value.__tensor_flatten__()[0])


def _fresh_state(optimizer: "Optimizer", parameter: "Tensor") -> dict[str, Any]:
    """Return the state that an optimizer makes in a first step, of a copy of one parameter."""
    import torch

    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    settings = {key: value for key, value in group.items() if key != "params"}
    clone = torch.nn.Parameter(parameter.detach().clone())
    clone.grad = torch.zeros_like(clone)
    trial: Any = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer) | {name: OrderedDict() for name in _HOOKS})
    vars(trial).pop("step", None)  # which a scheduler binds to the optimizer itself
    trial.state = defaultdict(dict)
    trial.param_groups = [{**copy.deepcopy(settings), "params": [clone]}]
    trial.step()
    return dict(trial.state[clone])


def _together(like: Any, parts: Mapping[str, "Tensor"], where: str) -> Any:
    """Return the subclass of which `parts` were saved; `like` is one of the same form."""
    inner, context = like.__tensor_flatten__() if _has_parts(like) else ((), None)
    forms = {name: _form(getattr(like, name)) for name in inner}
    saved = {name: _form(tensor) for name, tensor in parts.items()}
    if forms != saved:
        raise CheckpointError(
            f"The optimizer's state `{where}` was saved in the parts {saved}, but the optimizer "
            f"makes it of {forms or 'none'}. Make the optimizer with the settings of the save."
        )
    # What a subclass is made of need not lie where it says to be itself.
    moved = {name: tensor.to(getattr(like, name).device) for name, tensor in parts.items()}
    return type(like).__tensor_unflatten__(moved, context, like.size(), like.stride())


def _form(tensor: "Tensor") -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
