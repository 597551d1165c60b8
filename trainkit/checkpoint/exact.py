"""Put states back into what is there now, with the dtypes and the strides that they had."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics.torch_internals import buffers_of, is_saved
from trainkit.checkpoint.format.tensors import kept_strides


def load_state(owner: Any, state: Any) -> None:
    """Let an object take its state; an optimizer takes it exactly."""
    if isinstance(owner, Optimizer):
        load_optimizer(owner, state)
    else:
        owner.load_state_dict(state)


def parameter_states(optimizer: Optimizer) -> dict[Tensor, Any]:
    """Return the states of an optimizer's parameters, without what it keeps under other keys."""
    states: Mapping[Any, Any] = optimizer.state
    return {key: value for key, value in states.items() if isinstance(key, Tensor)}


def other_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return, under "other", what an optimizer keeps beside its groups and states of parameters.

    These are keys that its class adds to `state_dict`, and keys of `state` that are no parameters.
    """
    added = {
        key: value
        for key, value in optimizer.state_dict().items()
        if key not in ("state", "param_groups")
    }
    states: Mapping[Any, Any] = optimizer.state
    shared = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    return {"other": {"keys": added, "state": shared}} if added or shared else {}


def load_optimizer(
    optimizer: Optimizer,
    state: dict[str, Any],
    saved: Sequence[Tensor | None] | None = None,
    other: Mapping[str, Any] | None = None,
) -> None:
    """Load what `optimizer.state_dict` returned, exactly.

    torch converts every floating-point state to the dtype of its parameter, and does not look at
    strides: fused optimizers walk through the memory of both, and would pair other elements.
    Where a parameter lies otherwise now, or has another dtype, its state follows it.

    Args:
        saved: The parameters of all groups, in order, as they were saved; None where that is not
            known, and they were as they are now.
        other: What stood under "other" in `other_state`, if there was something.
    """
    if other is not None:
        state = {**state, "state": {**state["state"], **other["state"]}, **other["keys"]}
    devices = [
        {key: value.device for key, value in group.items() if isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]
    _load_in_place(optimizer, state)
    for group, of_group in zip(optimizer.param_groups, devices, strict=True):
        for key, device in of_group.items():
            if isinstance(group.get(key), Tensor):
                group[key] = group[key].to(device)  # such as a learning rate for graphs of CUDA
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [None] * len(numbers) if saved is None else saved
    for number, parameter, was in zip(numbers, parameters, saved, strict=True):
        values, present = state["state"].get(number), optimizer.state.get(parameter)
        if isinstance(values, dict) and isinstance(present, dict):
            for key in values.keys() & present.keys() - {"step"}:  # torch knows what a step is
                present[key] = _exact(values[key], present[key], parameter, was)


def _load_in_place(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state into the groups that are there, as an optimizer around another has the same."""
    groups, states = optimizer.param_groups, optimizer.state
    inner = [each for each in vars(optimizer).values() if isinstance(each, Optimizer)]
    sharing = [each for each in inner if each.param_groups is groups]
    optimizer.load_state_dict(state)
    if not isinstance(states, dict):
        return  # several optimizers as one
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        if group is not loaded:
            group.clear()
            group.update(loaded)
    if states is not optimizer.state:
        states.clear()
        states.update(optimizer.state)
    optimizer.state = states
    for each in (optimizer, *sharing):
        each.param_groups = groups


def _exact(value: Any, loaded: Any, parameter: Tensor, was: Tensor | None) -> Any:
    """Return what torch has loaded of a value as it was saved."""
    if isinstance(value, Tensor) and isinstance(loaded, Tensor):
        kept = value.dtype != (parameter if was is None else was).dtype
        if kept and loaded.dtype != value.dtype:
            loaded = value.to(loaded.device)
        return as_parameter(loaded, parameter, was)
    if isinstance(value, dict) and isinstance(loaded, dict):
        pairs = {k: (v, loaded[k]) for k, v in value.items() if k in loaded}
        return {**loaded, **{k: _exact(*pair, parameter, was) for k, pair in pairs.items()}}
    if type(value) in (list, tuple) and type(loaded) is type(value) and len(loaded) == len(value):
        pairs_of = zip(value, loaded, strict=True)
        return type(value)(_exact(*pair, parameter, was) for pair in pairs_of)
    return value if type(value) is str else loaded  # torch makes a generator's name of it


def as_parameter(value: Tensor, parameter: Tensor, was: Tensor | None = None) -> Tensor:
    """Return `value` with the strides of its parameter, if it had those when it was saved.

    `was` is the parameter as it was saved; None: `value` lay as it did.
    """
    fits = type(value) is Tensor and value.shape == parameter.shape
    if not fits or value.stride() == parameter.stride():
        return value
    if was is not None and value.stride() != was.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor | None]]:
    """Yield the name of each buffer that is saved with a module, whose it is, its key there, it."""
    for prefix, part in module.named_modules():
        for key, buffer in buffers_of(part).items():
            if is_saved(part, key):
                yield f"{prefix}.{key}" if prefix else key, part, key, buffer


def empty_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the saved buffers of a module that are None so far: whose they are, and their names.

    A forward may make them; the state of the module has them from then on.
    """
    return {
        name: (part, key) for name, part, key, buffer in saved_buffers(module) if buffer is None
    }


def resized_buffers(module: nn.Module, saved: Mapping[str, Any]) -> set[str]:
    """Return the buffers of another size in `saved` that the modules which hold them can load.

    Observers of quantization get their size from data; they are asked by a load on a copy of them,
    without the parameters.
    """
    resized = set()
    for name, part, key, buffer in saved_buffers(module):
        was = saved.get(name)
        if buffer is None or not isinstance(was, Tensor) or was.shape == buffer.shape:
            continue
        prefix = name.removesuffix(key)
        inside = {n: v for n, _, _, v in saved_buffers(part) if f"{prefix}{n}" in saved}
        trial = copy.deepcopy(part, {id(p): p for p in part.parameters()})
        try:
            trial.load_state_dict({n: saved[f"{prefix}{n}"] for n in inside}, strict=False)
        except Exception:  # whatever keeps it out: the shapes are what is told of it
            continue
        resized.add(name)
    return resized


def load_model(module: nn.Module, saved: Mapping[str, Any], *, older: bool = False) -> None:
    """Load what `module.state_dict` returned; buffers that a forward has made or replaced too.

    `older` checkpoints may be of those that kept no strides.
    """
    device = next((p.device for p in module.parameters()), None)
    for key, (part, name) in empty_buffers(module).items():
        if key in saved:
            buffers_of(part)[name] = torch.empty_like(saved[key], device=device)
    module.load_state_dict(saved)
    for name, buffer in module.named_buffers():
        was = saved.get(name)
        if type(buffer) is not Tensor or type(was) is not Tensor or buffer.shape != was.shape:
            continue
        strides = kept_strides(was)
        if strides != kept_strides(buffer) and not (older and strides is None):
            buffer.data = torch.empty_like(was, dtype=buffer.dtype, device=buffer.device).copy_(
                buffer
            )
