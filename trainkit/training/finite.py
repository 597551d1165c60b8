"""Values that are not finite: in what a checkpoint would hold, in gradients (rules 9, 11, 27)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainkit.basics.torch_internals import norm_of_each, stored_values
from trainkit.distributed.collectives import first_with
from trainkit.errors import NonFiniteError
from trainkit.strategies import Strategy
from trainkit.training.run import Run

_ADVICE = "`NaNGuard()` names the step and the parameter that it began with."


def finiteness(run: Run) -> dict[str, Any]:
    """Return what the manifest says of a run whose parameters or last loss are not finite.

    Nothing is returned where they are. Every process must call it, between two windows; the
    device is read a few times.

    Raises:
        NonFiniteError: They are not, and the run's `Checkpoint` refuses it; on all processes.
    """
    assert run.checkpoints.saver is not None
    if run.checkpoints.saver.non_finite == "allow" or _is_finite(run):
        return {}
    step = run.state.step
    broken = f"parameters or the loss of step {step} are not finite"
    if run.checkpoints.saver.non_finite == "raise":
        process = run.strategy.processes.rank
        raise NonFiniteError(f"Nothing is saved: {broken}. {_ADVICE}", step=step, process=process)
    if not run.checkpoints.saver.has_warned:
        run.checkpoints.saver.has_warned = True
        run.print(
            f"trainkit: {broken}. Such checkpoints are marked; the newest one without the mark "
            f"stays, and is what a resume takes. {_ADVICE}"
        )
    return {"finite": False}


def _is_finite(run: Run) -> bool:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for part in run.strategy.local_parts(run.module.parameters()):
            real = torch.view_as_real(part) if part.is_complex() else part
            # Numbers of one byte have no norm.
            if real.numel() and real.is_floating_point() and real.dtype.itemsize > 1:
                groups.setdefault((real.device, real.dtype), []).append(real)
        # The norm of a tensor is here its largest magnitude, which cannot overflow.
        norms = [torch.stack(norm_of_each(each, math.inf)) for each in groups.values()]
        finite = all(bool(torch.isfinite(each).all()) for each in norms)
        if run.state.consecutive_skips == 0:
            finite = finite and run.objectives.is_finite()
    bad = torch.tensor([int(not finite)])
    return not run.strategy.processes.all_reduce(bad, "max").item()


def low_scale(
    strategy: Strategy, named: Iterable[tuple[str, Tensor]], loss: Tensor, *, step: int
) -> NonFiniteError:
    """Return the error for gradients that overflow at the smallest scale; called by all."""
    parameters = dict(named)
    with torch.no_grad():
        parts = [strategy.local_gradients([p]) for p in parameters.values()]
        values = [[*map(stored_values, part)] for part in parts]
        bad = [i for i, part in enumerate(values) if not all(g.isfinite().all() for g in part)]
    processes = strategy.processes
    # A process without any gives the index after the last, and the one before the first.
    ends = torch.tensor([bad[0], -bad[-1]] if bad else [len(parts), 1])
    first, last = (processes.all_reduce(ends.clone(), "min") * torch.tensor([1, -1])).tolist()
    process = first_with(processes, int(ends[0]) == first) or 0
    value = processes.broadcast(loss.detach().float().mean(), process).item()
    names = [*parameters][first : last + 1]
    where = f", first that of `{names[0]}`, last that of `{names[-1]}`" if names else ""
    return NonFiniteError(
        f"The gradients overflow float16{where}, and the loss scale is at its smallest. After "
        f"{step} updates the loss of process {process} is {value:g}. At a smaller "
        "scale gradients would be rounded to zero. Lower the learning rate, look for inputs or "
        'losses that are not finite, or use "bf16"; `FP16(min_scale=...)` sets the smallest scale.',
        step=step,
        process=process,
        parameter=names[0] if names else None,
    )
