"""Where a value that is not finite came from, and from which samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.containers.tree import map_leaves
from trainkit.data import MicroBatch
from trainkit.data.split import slice_samples
from trainkit.distributed import collective_guard
from trainkit.errors import ConfigError, text_of
from trainkit.inspect.observer import Event, Observer
from trainkit.training.failure import indices_of
from trainkit.training.run import Run
from trainkit.training.weighting import loss_of
from trainkit.types import class_name

__all__ = ["STEP", "Fault", "Part", "find_fault", "is_bad", "parameter_sizes"]

STEP = "training_step"
"""What stands for a module where a fault is outside of the model."""

_KINDS = ("batch", "parameter", "error", "forward", "loss", "backward")
"""What tells the cause, the surest first: the others may be what came of it elsewhere."""
_ABSURD = 1e10  # no weight of a model that trains is larger; one with a flipped bit is


@dataclass(slots=True)
class Part:
    """A micro-batch of the window that is looked at."""

    micro_batch: MicroBatch
    first: int | None  # position of this process's first sample in the epoch, where it is known
    observer: Observer
    is_seen: bool = False


@dataclass(order=True, slots=True)
class Fault:
    """What was found that is not finite, or raised."""

    order: int = field(repr=False)  # the smaller, the surer
    process: int
    kind: str
    """batch, parameter, error, forward, loss or backward."""
    module: str
    """Where it began: a module of the model, "" for the model itself, or "training_step"."""
    text: str
    """The same in words."""
    parameter: str | None = None
    rows: list[int] = field(default_factory=list)
    """Samples of the process's micro-batch that make it, where that can be told."""
    positions: list[int] = field(default_factory=list)
    """The same in the order of the epoch."""
    indices: list[Any] = field(default_factory=list)
    """The same in the data set."""


def parameter_sizes(run: Run) -> dict[str, float]:
    """Return the largest magnitude in each parameter, or the part of it here; reads the device."""
    names = [name for name, _ in run.module.named_parameters()]
    with torch.no_grad():
        parts = run.strategy.local_parts(run.module.parameters())
        known = [(n, p) for n, p in zip(names, parts, strict=True) if p.numel() and p.itemsize > 1]
        return {name: float(p.abs().amax()) for name, p in known}


def is_bad(run: Run, sizes: dict[str, float], *, overflowed: bool) -> bool:
    """Return whether parameters, losses or gradients of a window are not finite, or absurd, here.

    Gradients that overflow alone are what the loss scale of fp16 is for.
    """
    if not all(size <= _ABSURD for size in sizes.values()) or not run.weighting.is_finite():
        return True
    gradients = [] if overflowed else run.strategy.local_gradients(run.parameters)
    return not all(bool(g.isfinite().all()) for g in gradients if not g.is_sparse)


def find_fault(
    run: Run,
    parts: list[Part],
    usual: set[tuple[str, str]],
    sizes: dict[str, float],
    error: Exception | None = None,
) -> Fault | None:
    """Return where it began on this process, and of which samples; None where all is well here.

    Args:
        run: Its window is complete but for the update, or was left by an error.
        parts: Its micro-batches, which were seen.
        usual: What is not finite where all is well, such as masks.
        sizes: Of the parameters before the window.
        error: What was raised.
    """
    for name, size in sizes.items():
        if not size <= _ABSURD:
            return _of_parameter(run, name)
    for part in parts:
        if (event := part.observer.first_bad(part.observer.events, usual)) is not None:
            return _of_event(run, part, event)
    if error is not None and parts and not parts[-1].observer.is_forward_done:
        under_way = parts[-1].observer.under_way
        where = under_way[-1] if under_way else STEP
        text = f"{_module(run, where)} raised {type(error).__name__}: {text_of(error)}"
        return _fault(run, "error", where, text, parts[-1], _alone(run, parts[-1], error=error))
    return _of_gradients(run, parts, error)


def _of_parameter(run: Run, name: str) -> Fault:
    parameter = run.module.get_parameter(name)
    (here,) = run.strategy.local_parts([parameter.detach()])
    flat = torch.nan_to_num(here.abs(), nan=math.inf).flatten()
    place = [int(i) for i in torch.unravel_index(flat.argmax(), here.shape)]
    value = here.flatten()[flat.argmax()].item()
    text = f"the parameter `{name}` is {value:g} at {place}, before the window begins"
    owner = name.rpartition(".")[0]
    return _fault(run, "parameter", owner, text, parameter=name)


def _of_event(run: Run, part: Part, event: Event) -> Fault:
    """Return the fault that a forward shows first."""
    rows = _rows(event, part.micro_batch.count)
    if event.what == "batch":
        text = "the batch itself holds values that are not finite"
        return _fault(run, "batch", STEP, text, part, rows)
    rows = rows if 0 < len(rows) < part.micro_batch.count else _alone(run, part) or rows
    if event.what == "loss":
        text = "the loss is not finite, the outputs of the model are"
        return _fault(run, "loss", STEP, text, part, rows)
    if event.what == "output":
        where = event.module
        text = f"the output of {_module(run, where)} is not finite, its inputs are"
    else:
        where = STEP if event.inside is None else event.inside
        text = f"{_module(run, where)} makes it before it calls {_module(run, event.module)}"
    return _fault(run, "forward", where, text, part, rows)


def _of_gradients(run: Run, parts: list[Part], error: Exception | None) -> Fault | None:
    for part in parts:
        if (event := part.observer.first_bad(part.observer.gradients, set())) is not None:
            where = part.observer.consumer(event)
            text = f"the backward of {_module(run, where)} makes it: what comes in is finite"
            return _fault(run, "backward", where, text, part, _alone(run, part, backward=True))
    if error is None:
        return None
    return _fault(run, "error", STEP, f"{type(error).__name__} was raised: {text_of(error)}")


def _fault(
    run: Run,
    kind: str,
    module: str,
    text: str,
    part: Part | None = None,
    rows: list[int] | None = None,
    parameter: str | None = None,
) -> Fault:
    rank, rows = run.processes.process_index, rows or []
    fault = Fault(_KINDS.index(kind), rank, kind, module, text, parameter, rows)
    if part is not None and part.first is not None and rows:
        fault.positions = [part.first + row for row in rows]
        first, last = part.first, part.first + max(rows)
        known = indices_of(run, {"first": first, "last": last}).get("indices", [])
        fault.indices = [known[row] for row in rows if row < len(known)]
    return fault


def _module(run: Run, name: str) -> str:
    if name == STEP:
        return f"`{STEP}`"
    module: nn.Module = run.module.get_submodule(name)
    return f"`{name}` ({class_name(module)})" if name else f"the model ({class_name(module)})"


def _rows(event: Event, count: int) -> list[int]:
    """Return which samples have rows that are not finite; none where rows are no samples."""
    rows = [] if event.rows is None else event.rows.tolist()
    if not rows or len(rows) % count:
        return []
    each = len(rows) // count
    return sorted({place // each for place, is_bad in enumerate(rows) if is_bad})


def _alone(
    run: Run, part: Part, *, backward: bool = False, error: Exception | None = None
) -> list[int]:
    """Return the samples that show the same without the others, by trying halves of halves."""
    together = any(isinstance(module, nn.SyncBatchNorm) for module in run.module.modules())
    if run.processes.num_processes > 1 and (run.strategy.sharded or together):
        return []  # the others would have to take part
    count = part.micro_batch.count

    def shows(start: int, stop: int) -> bool | None:
        try:
            piece = slice_samples(part.micro_batch.data, start, stop, count)
        except ConfigError:
            return None
        for batch in (piece, map_leaves(piece, _twice)) if stop - start == 1 else (piece,):
            try:
                return _shows(run, batch, backward=backward and error is None, raises=bool(error))
            except Exception as raised:
                if type(raised) is type(error):
                    return True
        return None

    return [] if shows(0, count) is None else _narrow(shows, 0, count)


def _shows(run: Run, batch: Any, *, backward: bool, raises: bool) -> bool:
    """Return whether a batch makes what is not finite; where an error is looked for, it raises."""
    with collective_guard.only("a replay"), run.precision.autocast():
        loss = loss_of(run.training_step(run.module, batch))
    if raises:
        return False
    if not backward:
        return not bool(torch.isfinite(loss).all())
    own = [p for p in run.parameters if p.requires_grad]
    gradients = torch.autograd.grad(loss.sum(), own, allow_unused=True)
    known: list[Tensor | None] = [*gradients]
    return not all(g is None or bool(g.isfinite().all()) for g in known)


def _twice(leaf: Any) -> Any:
    """Return one sample as two: batch statistics have none of one."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _narrow(shows: Callable[[int, int], bool | None], start: int, stop: int) -> list[int]:
    verdict = shows(start, stop)
    if verdict is False:
        return []
    if stop - start == 1:  # None: it cannot be tried
        return [start]
    middle = (start + stop) // 2
    found = _narrow(shows, start, middle) + _narrow(shows, middle, stop)
    return found or (list(range(start, stop)) if verdict else [])
