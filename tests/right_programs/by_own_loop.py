"""The same program in a loop of one's own, which saves its state after a micro-batch."""

from pathlib import Path

import torch
from torch import Tensor

from tests.right_programs.by_hand import Outcome, state_of, whole
from tests.right_programs.data import training_loader, windows
from tests.right_programs.losses import mean_loss
from tests.right_programs.models import make_model
from tests.right_programs.optimizers import make_optimizer
from tests.right_programs.program import BATCHES, BY_NAME, Program
from tests.right_programs.schedules import make_schedule
from trainkit import Accelerator

__all__ = ["batches", "fits", "train"]


def fits(p: Program) -> bool:
    """Return whether a program is trained so too: one of two that can be, on one process."""
    alone = p.processes == 1 and not p.is_stream and p.order not in BATCHES
    by_closure = p.optimizer == "LBFGS" and p.accumulation > 1
    return alone and not by_closure and p.flags % 2 == 0


def batches(p: Program) -> int:
    """Return the micro-batches of an epoch."""
    return sum(map(len, windows(p, 0)))


def train(p: Program, folder: Path, stop: int, *, resume: bool = False) -> Outcome:
    """Train for an epoch and save after `stop` micro-batches, or go on from there."""
    torch.manual_seed(p.seed)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision={"fp32": "no"}.get(p.precision, p.precision),
        gradient_accumulation_steps=p.accumulation,
    )
    bare = make_model(p)
    inner = make_optimizer(p, bare.parameters())
    model, optimizer, loader = accelerator.prepare(bare, inner, training_loader(p))
    held = [x for group in inner.param_groups for x in group["params"]]
    schedule = None
    if p.schedule not in (None, "ReduceLROnPlateau", *BY_NAME):
        schedule = accelerator.prepare(make_schedule(p, inner, batches(p)))
    left, done = loader, 0
    if resume:
        accelerator.load_state(folder)
        left, done = accelerator.skip_first_batches(loader, stop), stop

    for batch in left:
        with accelerator.accumulate(model):

            def closure(batch: object = batch) -> Tensor:
                optimizer.zero_grad()
                loss = mean_loss(p, model, batch)[1]
                accelerator.backward(loss)
                return loss.detach()

            if p.optimizer == "LBFGS":
                optimizer.step(closure)
            else:
                accelerator.backward(mean_loss(p, model, batch)[1])
                if p.max_grad_norm is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(held, p.max_grad_norm)
                optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()
        done += 1
        if done == stop and not resume:
            accelerator.save_state(folder)
    module = accelerator.unwrap_model(model)
    return Outcome(
        weights={name: value.clone() for name, value in module.state_dict().items()},
        state={name: whole(value) for name, value in state_of(module, inner).items()},
        rates=[float(group["lr"]) for group in inner.param_groups],
    )
