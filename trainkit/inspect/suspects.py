"""Where a value that is not finite came from, and from which samples."""

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


@dataclass(slots=True)
class Fault:
    """What was found that is not finite, or raised."""

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


def surest(faults: list[Fault]) -> Fault | None:
    """Return of the faults of all processes the one that tells the cause."""
    return min(faults, key=lambda fault: (_KINDS.index(fault.kind), fault.process), default=None)


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
    if not all(size <= _ABSURD for size in sizes.values()) or not run.objectives.is_finite():
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
    """
    rank = run.strategy.processes.rank
    for name, size in sizes.items():
        if not size <= _ABSURD:
            text = f"the parameter `{name}` holds {size:g} before the window begins"
            return Fault(rank, "parameter", name.rpartition(".")[0], text, name)
    for part in parts:
        if (event := part.observer.first_bad(part.observer.events, usual)) is not None:
            fault = Fault(rank, *_of_event(run, event))
            rows = _rows(event, part.micro_batch.count)
            if fault.kind != "batch" and not 0 < len(rows) < part.micro_batch.count:
                rows = _alone(run, part, fault.kind) or rows
            return _placed(run, fault, part, rows)
    if error is not None and parts and not parts[-1].observer.is_forward_done:
        where = ([STEP, *parts[-1].observer.under_way])[-1]
        text = f"{_module(run, where)} raised {type(error).__name__}: {text_of(error)}"
        fault = Fault(rank, "error", where, text)
        return _placed(run, fault, parts[-1], _alone(run, parts[-1], "error", error))
    for part in parts:
        if (event := part.observer.first_bad(part.observer.gradients, set())) is not None:
            where = part.observer.consumer(event)
            text = f"the backward of {_module(run, where)} makes it: what comes in is finite"
            fault = Fault(rank, "backward", where, text)
            return _placed(run, fault, part, _alone(run, part, "backward"))
    if error is None:
        return None
    return Fault(rank, "error", STEP, f"{type(error).__name__} was raised: {text_of(error)}")


def _of_event(run: Run, event: Event) -> tuple[str, str, str]:
    """Return the kind of what a forward shows first, its module, and both in words."""
    if event.what == "batch":
        return "batch", STEP, "the batch itself holds values that are not finite"
    if event.what == "loss":
        return "loss", STEP, "the loss is not finite, the outputs of the model are"
    module = _module(run, event.module)
    if event.what == "output":
        return "forward", event.module, f"the output of {module} is not finite, its inputs are"
    where = STEP if event.inside is None else event.inside
    return "forward", where, f"{_module(run, where)} makes it before it calls {module}"


def _module(run: Run, name: str) -> str:
    if name == STEP:
        return f"`{STEP}`"
    module: nn.Module = run.module.get_submodule(name)
    return f"`{name}` ({class_name(module)})" if name else f"the model ({class_name(module)})"


def _placed(run: Run, fault: Fault, part: Part, rows: list[int]) -> Fault:
    """Say where the samples of a fault are in the epoch and in the data set."""
    fault.rows = rows
    if part.first is not None and rows:
        fault.positions = [part.first + row for row in rows]
        first, last = part.first, part.first + max(rows)
        known = indices_of(run, {"first": first, "last": last}).get("indices", [])
        fault.indices = [known[row] for row in rows if row < len(known)]
    return fault


def _rows(event: Event, count: int) -> list[int]:
    """Return which samples have rows that are not finite; none where rows are no samples."""
    rows = [] if event.rows is None else event.rows.tolist()
    if not rows or len(rows) % count:
        return []
    each = len(rows) // count
    return sorted({index // each for index, is_bad in enumerate(rows) if is_bad})


def _alone(run: Run, part: Part, kind: str, error: Exception | None = None) -> list[int]:
    """Return the samples that show the same without the others."""
    together = any(isinstance(module, nn.SyncBatchNorm) for module in run.module.modules())
    if run.strategy.processes.size > 1 and (run.strategy.sharded or together):
        return []  # the others would have to take part
    count, bad = part.micro_batch.count, []
    for row in range(count):
        try:
            sample = slice_samples(part.micro_batch.data, row, row + 1, count)
        except ConfigError:  # it cannot be cut
            return []
        for batch in (sample, map_leaves(sample, _twice)):
            try:
                shows = _shows(run, batch, kind)
            except Exception as raised:
                shows = type(raised) is type(error)
                if not shows:
                    continue
            bad += [row] if shows else []
            break
    return bad


def _twice(leaf: Any) -> Any:
    """Return one sample as two: batch statistics have none of one."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf


def _shows(run: Run, batch: Any, kind: str) -> bool:
    """Return whether a batch makes what is not finite; an error it raises."""
    with collective_guard.only("a replay"), run.precision.autocast():
        loss = loss_of(run.training_step(run.module, batch))
    if kind == "error":
        return False
    if kind != "backward":
        return not bool(torch.isfinite(loss).all())
    own = [p for p in run.parameters if p.requires_grad]
    gradients = torch.autograd.grad(loss.sum(), own, allow_unused=True)
    known: list[Tensor | None] = [*gradients]
    return not all(g is None or bool(g.isfinite().all()) for g in known)
