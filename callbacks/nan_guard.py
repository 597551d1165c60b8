"""Find the first loss or gradient that is NaN or infinite."""

import math
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.torch_internals import norm_of_each, stored_values
from trainkit.distributed.collectives import ranks_with
from trainkit.errors import NonFiniteError, named
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["NaNGuard"]

MOST_STEPS = 1024  # between two checks
NEVER = torch.iinfo(torch.int64).max


class NaNGuard(Callback):
    """Acts on a loss or gradient that is NaN or infinite (rule 11).

    The overflows that fp16 finds by itself are none of its business. It must be in the list of
    callbacks on every process.

    Args:
        policy: "raise": the first bad step is kept on the device, without reading it, and looked
            at where values are logged, at the end of an epoch, before an evaluation and at the
            end; then `NonFiniteError` is raised on all processes. "skip": a window whose global
            gradient norm is not finite is not applied; costs one read of the device a step.
            Buffers that the forward changed, such as batch statistics, stay changed.
    """

    alike = ("policy",)

    @checked
    def __init__(self, policy: Literal["raise", "skip"] = "raise") -> None:
        self.policy = policy
        self._first_bad: _FirstBad | None = None

    @override
    def on_fit_start(self, run: Run) -> None:
        self._first_bad = _FirstBad(run) if self.policy == "raise" else None

    @override
    def on_gradients(self, run: Run) -> None:
        if self._first_bad is not None:
            self._first_bad.see_gradients(run)
            return
        norm = run.strategy.grad_norm(run.parameters).item()  # equal on all processes
        if not math.isfinite(norm):
            run.request_skip(f"the gradient norm is {norm}")

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._first_bad is not None:
            self._first_bad.end_step(run, result.loss, result.weight)
            is_last = run.state.step == run.planned_steps
            if run.is_log_step or is_last or self._first_bad.unchecked >= MOST_STEPS:
                self._first_bad.check(run)

    def _check(self, run: Run) -> None:
        if self._first_bad is not None:
            self._first_bad.check(run)

    on_epoch_end = on_evaluation_start = on_checkpoint_start = _check

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        self._first_bad = None  # a check is a collective, which the others may not come to

    @override
    def on_fit_end(self, run: Run) -> None:
        self._check(run)
        self._first_bad = None


class _FirstBad:
    """The first bad step of this process; nothing is read from the device before `check`.

    A bad loss is kept as the number of updates before it, a bad gradient as that number times
    the number of parameters plus the position of the first bad one: so the smaller is the first.
    """

    def __init__(self, run: Run) -> None:
        self._parameters = run.parameters
        self._device = run.strategy.device
        self._loss = torch.full((), NEVER, device=self._device)
        self._gradient = torch.full((), NEVER, device=self._device)
        self._window: Tensor | None = None  # of gradients that may still be skipped
        self._positions = torch.arange(len(self._parameters), device=self._device)
        self._steps: list[tuple[int, int, int]] = []

    @property
    def unchecked(self) -> int:
        """Steps since the last check."""
        return len(self._steps)

    def see_gradients(self, run: Run) -> None:
        """Look at the gradients of a window."""
        of_each = (run.strategy.local_gradients([p]) for p in self._parameters)
        # A shard may be empty.
        present = {i: g for i, own in enumerate(of_each) for g in own if g.numel()}
        self._window = None
        if not present:
            return
        # The largest element, not the L2 norm: the square of a finite number may be infinite.
        norms = norm_of_each([*map(stored_values, present.values())], float("inf"))
        if len(norms) < len(self._parameters):
            # The device is not told which are there, which would wait in every turn of a GAN.
            of = dict(zip(present, norms, strict=True))
            nothing = norms[0].new_zeros(())
            norms = tuple(of.get(i, nothing) for i in range(len(self._parameters)))
        codes = self._positions + run.state.step * len(self._parameters)
        self._window = torch.where(
            torch.isfinite(torch.stack(norms).to(self._device)), NEVER, codes
        ).amin()

    def end_step(self, run: Run, loss: Tensor, weight: Tensor | float) -> None:
        """Look at the loss of a window that was applied, and keep what its gradients showed."""
        state = run.state
        bad = ~torch.isfinite(loss.reshape(()))
        if isinstance(weight, Tensor):
            bad &= weight > 0  # a mean over no items is NaN, and counts for nothing
        if isinstance(weight, Tensor) or weight > 0:
            self._loss = torch.minimum(self._loss, torch.where(bad, state.step - 1, NEVER))
        if self._window is not None:
            self._gradient = torch.minimum(self._gradient, self._window)
        end = state.epoch_samples
        self._steps.append((run.data_epoch(state.epoch), end - run.objectives.samples, end))

    def check(self, run: Run) -> None:
        """Raise NonFiniteError on all processes if any of them saw a bad step.

        Every process must call it. It reads the device and makes one collective.
        """
        if not self._steps:
            return
        processes = run.strategy.processes
        codes = torch.stack([self._loss, self._gradient])
        loss_step, gradient_code = processes.all_reduce(codes.clone(), "min").tolist()
        gradient_step, position = divmod(gradient_code, len(self._parameters))
        step = min(loss_step, gradient_step)
        if step < run.state.step:
            bad_here = int(codes[0]) == step
            ranks = ranks_with(processes, bad_here)
            names = {id(p): name for name, p in run.module.named_parameters()}
            bad = names.get(id(self._parameters[position])) if gradient_step == step else None
            raise self._error(run, step, ranks, bad)
        self._steps.clear()

    def _error(self, run: Run, step: int, ranks: list[int], name: str | None) -> NonFiniteError:
        epoch, start, end = self._steps[step - run.state.step]
        reasons = []
        if ranks:
            reasons.append(f"the loss of {named(ranks)}")
        if name is not None:
            reasons.append(f"the gradient of `{name}`{'' if ranks else ' (not the loss)'}")
        what = " and ".join(reasons) or "a gradient (not the loss)"
        return NonFiniteError(
            f"After step {step}, {what} became NaN or infinite. The window held the samples "
            f"{start} to {end - 1} in the order of epoch {epoch}, all processes together. Look at "
            "these samples, lower the learning rate, or clip with `max_grad_norm`; "
            '`NaNGuard("skip")` leaves such windows out.',
            step=step,
            process=ranks[0] if ranks else 0,
            parameter=name,
        )
