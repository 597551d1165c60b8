"""The algorithm of training: fit, an epoch, a step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor

from trainkit.training.callback import Callback, CallbackList, Step
from trainkit.training.phases import begin, check_reached, finish, first_window, follow_plan, serve
from trainkit.types import StepResult

if TYPE_CHECKING:
    from trainkit.data import MicroBatch, Window
    from trainkit.training.run import Run

__all__ = ["fit", "train_epoch", "train_step"]

_NOTHING: AbstractContextManager[object] = nullcontext()


def fit(run: Run, callbacks: CallbackList, step: Step) -> None:
    """Train by `step` until the run's end or a request to stop; `on_fit_end` comes anyway."""
    failed = False
    try:
        run.optimizer.zero_grad(set_to_none=True)
        callbacks.emit(Callback.on_fit_start, run)
        begin(run, callbacks)
        while run.stop_reason is None:
            train_epoch(run, callbacks, step)
        finish(run, callbacks)
    except BaseException as error:
        failed = True
        from trainkit.training.failure import report_failure  # only failures need it

        report_failure(run, error)
        callbacks.emit_to_all(Callback.on_exception, run, error)
        raise
    finally:
        run.weights.evaluate()  # no step follows
        error_at_end = callbacks.emit_to_all(Callback.on_fit_end, run)
        if error_at_end is not None and not failed:  # must not hide the first error
            raise error_at_end


def train_epoch(run: Run, callbacks: CallbackList, step: Step) -> None:
    """Train on what is left of the current epoch, or until a request to stop."""
    state = run.state
    if state.epoch_samples == 0:
        callbacks.emit(Callback.on_epoch_start, run)
    run.stop_reason = run.requests.stop
    if run.stop_reason is not None:
        return
    windows, window = first_window(run)
    while window is not None:
        step(run, callbacks, window)
        window = next(windows, None)
        if window is not None:  # else the end of the epoch comes before the phases
            serve(run, callbacks)
            if run.stop_reason is not None:
                windows.close()
                return
    end_epoch(run, callbacks)


def train_step(run: Run, callbacks: CallbackList, window: Window) -> None:
    """Accumulate the gradients of a window, then update the parameters once."""
    weighting, state = run.weighting, run.state
    callbacks.emit(Callback.on_step_start, run)
    weighting.begin(window)
    for micro_batch in window:
        run.logging.samples = micro_batch.count  # of what `run.log` is given until the next one
        if micro_batch.count == 0:
            with run.as_zero_weight():
                forward_backward(run, micro_batch)
        else:
            callbacks.emit(Callback.on_microbatch_start, run, micro_batch.data)
            forward_backward(run, micro_batch)
            callbacks.emit(Callback.on_microbatch_end, run, micro_batch.data)
    run.logging.samples = None
    run.reduce_gradients()
    if weighting.reached is not None:
        check_reached(run, weighting)
    overflowed = run.precision.unscale(run.optimizer, run.strategy.reduce_overflow)
    if not overflowed:
        callbacks.emit(Callback.on_gradients, run)
    state.epoch_samples += weighting.samples
    state.samples_seen += weighting.samples
    if overflowed or run.requests.skip is not None:
        skip(run, callbacks)
    else:
        update(run, callbacks)


def forward_backward(run: Run, micro_batch: MicroBatch) -> None:
    """Accumulate the gradients of one micro-batch; the last one of a window reduces them."""
    with _NOTHING if micro_batch.last else run.strategy.no_sync(run.model):
        with run.precision.autocast():
            output = run.training_step(run.model, micro_batch.data)
            loss = run.weighting.weigh(output, micro_batch)
        if micro_batch.last and run.strategy.processes.size > 1:
            run.strategy.begin_reduction(run.model)
        run.weighting.backward(loss, run.precision.backward)


def update(run: Run, callbacks: CallbackList) -> None:
    """Clip, apply the gradients, and advance what counts steps."""
    config, state, optimizer = run.config, run.state, run.optimizer
    loss, weight = run.weighting.result()
    result = StepResult(loss, grad_norm=clip(run))
    if run.closure is None:
        run.precision.step(optimizer)
    else:  # LBFGS and the like compute loss and gradients again
        optimizer.step(run.closure)
    if run.lr_schedule is not None:
        run.lr_schedule.advance("step")
    optimizer.zero_grad(set_to_none=True)
    state.step += 1
    state.consecutive_skips = 0
    if run.logging.is_read:
        run.logging.sums.add("loss", loss, weight)
        if result.grad_norm is not None:
            run.logging.sums.add("grad_norm", result.grad_norm)
    callbacks.emit(Callback.on_step_end, run, result)
    if state.step == config.max_steps:
        run.request_stop("max_steps", agreed=True)


def clip(run: Run) -> Tensor | None:
    """Clip the gradients as the configuration says; return their norm before, where it is taken."""
    config, norm = run.config, None
    if config.max_grad_norm is not None:
        norm = run.strategy.clip_grad_norm(run.parameters, config.max_grad_norm)
    if config.max_grad_value is not None:
        run.strategy.clip_grad_value(run.parameters, config.max_grad_value)
    return norm


def skip(run: Run, callbacks: CallbackList) -> None:
    """Clear the gradients and leave everything else as it was (rule 9)."""
    state = run.state
    loss, _ = run.weighting.result()
    reason, run.requests.skip = run.requests.skip or run.overflow(loss), None
    run.optimizer.zero_grad(set_to_none=True)
    state.skipped_steps += 1
    state.consecutive_skips += 1
    callbacks.emit(Callback.on_step_skipped, run, StepResult(loss, skipped=True, reason=reason))
    run.refuse_more_skips(reason)


def end_epoch(run: Run, callbacks: CallbackList) -> None:
    """Count the epoch, then serve what its last step and its end ask for, once."""
    state = run.state
    follow_plan(run)
    if run.lr_schedule is not None:
        run.lr_schedule.advance("epoch")
    state.epoch += 1
    state.epoch_samples = 0
    run.requests.evaluation |= run.evaluation.after_epochs
    callbacks.emit(Callback.on_epoch_end, run)
    if (end := run.end_reached) is not None:
        run.request_stop(end, agreed=True)
    serve(run, callbacks)
