"""What the parts of a checkpoint must look like that both faces save: streams, optimizers, scales.

Digests find accidents. These checks find what was written by something else, or changed and
signed again: everything that a resume uses is looked at before anything is applied.
"""

import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.checkpoint.checkpoint import Checkpoint
from trainkit.checkpoint.format.names import JSON_SUFFIX, MANIFEST, TENSOR_SUFFIX
from trainkit.checkpoint.format.value_checks import (
    Check,
    Unfit,
    anything,
    between,
    each,
    finite,
    flag,
    like,
    listed,
    maybe,
    must_be,
    record,
    row,
    tensor,
    tensor_like,
    text,
    whole,
    within,
)
from trainkit.errors import CheckpointCorrupt, CheckpointError

__all__ = [
    "SCALE",
    "STREAM",
    "STREAMS",
    "applying",
    "blaming",
    "check_optimizer_form",
    "check_schedule_form",
    "refuse",
    "torch_state",
]

_FLAGS = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"}
_FLAGS |= {"maximize", "nesterov"}


@contextmanager
def blaming(checkpoint: Checkpoint, part: str | None) -> Iterator[None]:
    """Turn `Unfit` into an error on the file of a part; None: on the manifest."""
    try:
        yield
    except Unfit as error:
        names = [MANIFEST] if part is None else [part + JSON_SUFFIX, part + TENSOR_SUFFIX]
        file = next((name for name in names if name in checkpoint.manifest.files), names[0])
        raise CheckpointCorrupt(
            f"The checkpoint `{checkpoint.path}` is broken: `{file}`: {error}. Nothing of it was "
            "applied.",
            path=checkpoint.path,
            file=file,
        ) from error


@contextmanager
def applying(what: str, path: Any) -> Iterator[None]:
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


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raise CheckpointError where there are problems: whole sentences without a full stop."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointError(f"The checkpoint `{path}` does not fit:\n{listed}", path=path)


def _state_of(what: str, take: Callable[[Any], object]) -> Check:
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


torch_state = _state_of("torch's", lambda value: torch.Generator().set_state(value))

STREAMS: dict[str, Check] = {
    "python": _state_of("Python's", lambda value: random.Random().setstate(value)),
    "numpy": maybe(_state_of("NumPy's", _take_numpy)),
    "torch": torch_state,
    "device": maybe(
        must_be(
            "a state of a device's generator",
            lambda v: isinstance(v, Tensor) and v.dtype == torch.uint8 and v.ndim == 1,
        )
    ),
}

_OF_STREAM = record(
    {"items": whole, "ended": flag, "before_last": anything, "batches": whole},
    optional={"batches"},  # only of epochs that are limited
)
STREAM = record({"shards": whole, "inside": flag, "state": maybe(_OF_STREAM)})

SCALE = record(
    {
        "scale": between(0, math.inf),
        "growth_factor": between(1, math.inf),
        "backoff_factor": between(0, 1),
        "growth_interval": whole,
        "_growth_tracker": whole,
    }
)


def check_schedule_form(saved: Any, scheduler: Any, *, strict: bool) -> None:
    """Check the state of a scheduler of torch or trainkit; others know their own.

    Args:
        strict: Whether the same version of torch wrote it, which knows the same keys.
    """
    if not type(scheduler).__module__.startswith(("torch.", "trainkit.")):
        return
    present = scheduler.state_dict()
    record({})(saved)
    for key in saved:
        if callable(getattr(type(scheduler), str(key), None)):
            raise Unfit("is no state, but a method of the scheduler", key)
    table = {key: _loosely(key, value) for key, value in present.items()}
    record(table, optional=() if strict else set(present) - {"last_epoch"})(saved)
    for key in ("base_lrs", "_last_lr"):
        if key in saved and isinstance(present.get(key), list):
            within(row(*[_rate] * len(present[key])), saved[key], key)


def _loosely(key: str, present: Any) -> Check:
    if key in ("last_epoch", "_step_count", "num_bad_epochs", "cooldown_counter"):
        return whole
    if isinstance(present, list) and present:
        plain = not isinstance(present[0], Mapping) and present[0] is not None
        return listed(like(present[0]) if plain else maybe(record({})))
    if isinstance(present, Mapping):
        return record({})
    return maybe(_rate) if present is None else like(present)


def _rate(value: Any) -> None:
    if not (isinstance(value, Tensor) and value.numel() == 1):
        finite(value)


def check_optimizer_form(
    saved: Any, optimizer: Optimizer, parameters: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Check the state of an optimizer, whose parameters are called by their names.

    Args:
        parameters: By name; what they have as state is known of optimizers of torch.
        strict: Whether the same version of torch wrote it, which knows the same keys.
    """
    groups = listed(record({"params": listed(text)}))
    other = record({"keys": record({}), "state": record({})})
    form = {"state": each(each(anything)), "groups": groups}
    form |= {"parts": each(each(each(tensor))), "other": other}
    record(form, optional={"parts", "other"})(saved)
    names = [name for group in saved["groups"] for name in group["params"]]
    if len(set(names)) != len(names):
        raise Unfit("has one parameter twice", "groups")
    for key in ("state", "parts"):
        unknown = [name for name in saved.get(key, {}) if name not in names]
        if unknown:
            raise Unfit("belongs to no group", key, unknown[0])
    if "training_weights" in saved:
        table = {name: tensor_like(parameters[name]) for name in names if name in parameters}
        within(record(table), saved["training_weights"], "training_weights")
    if not type(optimizer).__module__.startswith("torch.optim"):
        return  # what an option or a state of another one may become, only that one knows
    pairs = zip(saved["groups"], optimizer.param_groups, strict=False)
    for index, (group, present) in enumerate(pairs):
        options = (*optimizer.defaults, "lr")
        checks = {key: _option(key, value) for key, value in present.items() if key in options}
        within(record(checks, optional=() if strict else checks), group, "groups", index)
        _check_states(index, group, optimizer, saved["state"], parameters, strict=strict)


def _option(key: str, present: Any) -> Check:
    if key in _FLAGS or isinstance(present, bool):
        return maybe(flag)
    if present is None:
        return anything
    if isinstance(present, tuple | list):
        return row(*(anything if item is None else _rate for item in present))
    if isinstance(present, int | float | Tensor):
        return _rate
    return like(present)


def _check_states(
    index: int,
    group: Mapping[str, Any],
    optimizer: Optimizer,
    states: Mapping[str, Any],
    parameters: Mapping[str, Tensor],
    *,
    strict: bool,
) -> None:
    """Compare states with what the optimizer itself makes of a small parameter of each kind."""
    made: dict[Any, dict[str, Any] | None] = {}
    for name in group["params"]:
        parameter, state = parameters.get(name), states.get(name)
        if parameter is None or not state:
            continue
        kind = (parameter.dtype, parameter.ndim, parameter.device)
        if kind not in made:
            made[kind] = _made(optimizer, index, group, *kind)
        expected = made[kind]
        if expected is None:
            return
        table = {key: _made_like(key, value, parameter) for key, value in expected.items()}
        check = record(table, optional=() if strict else table)
        within(check, state, "state", name)


def _made_like(key: str, made: Any, parameter: Tensor) -> Check:
    if key == "step":
        return _step
    if not isinstance(made, Tensor):
        return anything if made is None else _rate
    if made.shape == (2,) * parameter.ndim:
        return tensor_like(torch.empty(parameter.shape, dtype=made.dtype, device="meta"))
    return tensor


def _step(value: Any) -> None:
    if isinstance(value, Tensor) and value.ndim == 0:
        value = value.item()
    finite(value)
    whole(int(value))


def _made(
    optimizer: Optimizer,
    index: int,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    ndim: int,
    device: torch.device,
) -> dict[str, Any] | None:
    """Return the state that an optimizer makes of one small parameter; None if it cannot."""
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters.keys() - {"params"}

    def make(options: Mapping[str, Any]) -> dict[str, Any]:
        dummy = nn.Parameter(torch.zeros((2,) * ndim, dtype=dtype, device=device))
        dummy.grad = torch.zeros_like(dummy)
        chosen = {key: value for key, value in options.items() if key in accepted}
        if "lr" in optimizer.defaults:  # schedules make of it what they like
            chosen["lr"] = optimizer.defaults["lr"]
        one = kind([dummy], **chosen)
        with torch.no_grad():
            one.step()
        return dict(one.state[dummy])

    try:
        make(optimizer.param_groups[index])
    except Exception:  # needs more than that, such as sparse gradients
        return None
    try:
        return make(group)
    except Exception as error:
        raise Unfit(f"is refused by `{kind.__name__}`: {error}", "groups", index) from None
