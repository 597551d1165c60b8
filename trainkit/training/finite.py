"""Whether what a checkpoint would hold is still of use (rules 11, 27)."""

import math
from typing import Any

import torch
from torch import Tensor

from trainkit.basics.torch_internals import norm_of_each
from trainkit.errors import NonFiniteError
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
    found = f"parameters or the loss of step {step} are not finite"
    if run.checkpoints.saver.non_finite == "raise":
        process = run.strategy.processes.rank
        raise NonFiniteError(f"Nothing is saved: {found}. {_ADVICE}", step=step, process=process)
    if not run.checkpoints.saver.has_warned:
        run.checkpoints.saver.has_warned = True
        run.print(
            f"trainkit: {found}. Such checkpoints are marked; the newest one without the mark "
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
