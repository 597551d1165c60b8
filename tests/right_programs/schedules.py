"""Every schedule of torch, and those by name written once more."""

import math
from typing import Any

from torch.optim import Optimizer, lr_scheduler as torch_schedules
from torch.optim.swa_utils import SWALR

from tests.right_programs.program import Program

__all__ = ["make_by_name", "make_schedule"]


def make_schedule(program: Program, optimizer: Optimizer, advances: int) -> Any:
    """Return the schedule of a program, for a run in which it advances so often."""
    name, t = program.schedule, torch_schedules
    length = max(1, round(program.length * advances))
    # After half of the run the rate is a tenth of what it was, or more.
    falls = 0.1 ** (2 * program.strength / max(advances, 2))
    factor = 0.2 + 0.7 * program.strength
    moves = any("momentum" in group or "betas" in group for group in optimizer.param_groups)
    moves = moves and program.model != "sparse embedding"  # momentum of sparse gradients is sparse
    if name == "ChainedScheduler":
        return t.ChainedScheduler([t.LinearLR(optimizer, 0.5), t.ExponentialLR(optimizer, falls)])
    if name == "ConstantLR":
        return t.ConstantLR(optimizer, factor, length)
    if name == "CosineAnnealingLR":
        return t.CosineAnnealingLR(optimizer, length, eta_min=0.001 * program.strength)
    if name == "CosineAnnealingWarmRestarts":
        return t.CosineAnnealingWarmRestarts(optimizer, max(1, length // 3), T_mult=2)
    if name == "CyclicLR":
        return t.CyclicLR(optimizer, 0.001, 0.02, max(1, length // 3), cycle_momentum=False)
    if name == "ExponentialLR":
        return t.ExponentialLR(optimizer, falls)
    if name == "LambdaLR":
        return t.LambdaLR(optimizer, lambda step: 1 / (1 + program.strength * step))
    if name == "LinearLR":
        return t.LinearLR(optimizer, *((factor, 1.0), (1.0, factor))[length % 2], length)
    if name == "MultiStepLR":
        return t.MultiStepLR(optimizer, sorted({max(1, length // 2), length}), factor)
    if name == "MultiplicativeLR":
        return t.MultiplicativeLR(optimizer, lambda step: falls)
    if name == "OneCycleLR":
        total = max(length, 2)
        return t.OneCycleLR(optimizer, 0.03, total, cycle_momentum=moves)
    if name == "PolynomialLR":
        return t.PolynomialLR(optimizer, length, power=1 + program.strength)
    if name == "ReduceLROnPlateau":
        return t.ReduceLROnPlateau(optimizer, factor=factor, patience=0, threshold=0.05)
    if name == "SWALR":
        return SWALR(optimizer, 0.005, anneal_epochs=length)
    if name == "SequentialLR":
        early = max(1, length // 2)
        parts = [t.LinearLR(optimizer, 0.3, total_iters=early), t.StepLR(optimizer, 2, factor)]
        return t.SequentialLR(optimizer, parts, [early])
    assert name == "StepLR"
    return t.StepLR(optimizer, max(1, length // 3), factor)


def make_by_name(program: Program, optimizer: Optimizer, updates: int) -> Any:
    """Return a schedule by name, as the docs describe it."""
    warmup = program.warmup
    begin = warmup if isinstance(warmup, int) else round(warmup * updates)
    left = updates - begin
    last = {"wsd": math.ceil(updates / 5), "constant": 0}.get(str(program.schedule), left)
    last = min(last, left)

    def factor(step: int) -> float:
        if step < begin:
            return (step + 1) / (begin + 1)
        done = max(0.0, step - (updates - last)) / last if last else 0.0
        cosine = program.schedule == "cosine"
        return math.cos(math.pi * done / 2) ** 2 if cosine else 1 - min(done, 1.0)

    return torch_schedules.LambdaLR(optimizer, factor)
