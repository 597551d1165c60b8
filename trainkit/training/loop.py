"""The algorithm of training: fit, an epoch, a step. Rules are those of `docs/design.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.training import phases
from trainkit.training.callback import Callback
from trainkit.training.callback_list import CallbackList
from trainkit.types import NOTHING, StepResult

if TYPE_CHECKING:
    from trainkit.data import MicroBatch, Window
    from trainkit.training.objectives import Objective
    from trainkit.training.run import Run


def fit(run: Run, callbacks: CallbackList) -> None:
    """Train until the run's end or a request to stop; `on_fit_end` comes anyway."""
    failure: BaseException | None = None
    try:
        run.optimizer.zero_grad(set_to_none=True)
        callbacks.emit(Callback.on_fit_start, run)
        phases.begin(run, callbacks)
        while run.stop_reason is None:
            train_epoch(run, callbacks)
        phases.finish(run, callbacks)
    except BaseException as error:
        failure = error
        from trainkit.training.failure import report_failure  # only failures need it

        report_failure(run, error)  # does not return where another process has failed first
        callbacks.emit_past_errors(Callback.on_exception, failure, run, error)
        raise
    finally:
        run.internals.weights.evaluate()  # no step follows
        callbacks.emit_past_errors(Callback.on_fit_end, failure, run)


def train_epoch(run: Run, callbacks: CallbackList) -> None:
    """Train on what is left of the current epoch, or until a request to stop."""
    state = run.state
    if state.epoch_samples == 0:
        callbacks.emit(Callback.on_epoch_start, run)
    run.stop_reason = run.requests.stop
    if run.stop_reason is not None:
        return
    windows, window = phases.first_window(run)
    while window is not None:
        train_step(run, callbacks, window)
        window = next(windows, None)
        if window is not None:  # else the end of the epoch comes before the phases
            phases.serve(run, callbacks)
            if run.stop_reason is not None:
                windows.close()
                return
    end_epoch(run, callbacks)


def train_step(run: Run, callbacks: CallbackList, window: Window) -> None:
    """Accumulate the gradients of a window, then update the parameters once.

    An objective is a loss and its optimizer. There is one; of several a window is for some.
    """
    state, objectives = run.state, run.objectives
    callbacks.emit(Callback.on_step_start, run)
    results: dict[str, StepResult] = {}
    with objectives.begin(window, state):
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
        for each in objectives.active:
            if each.finish(state):
                results[each.name] = skip(run, each)  # an overflow
            if each.weighting.reached is not None:
                phases.check_reached(run, each.weighting)
    active = objectives.active
    left = [each for each in active if each.name not in results] if results else active
    if left:
        callbacks.emit(Callback.on_gradients, run)
    samples = active[0].weighting.samples
    state.epoch_samples += samples
    state.samples_seen += samples
    asked, run.requests.skip = run.requests.skip, None
    for each in left:
        results[each.name] = update(run, each) if asked is None else skip(run, each, asked)
    result = objectives.put_together(results) if objectives.by_name else results[""]
    if result.skipped:
        state.skipped_steps += 1
        state.consecutive_skips += 1
        callbacks.emit(Callback.on_step_skipped, run, result)
    else:
        state.step += 1
        state.consecutive_skips = 0
        callbacks.emit(Callback.on_step_end, run, result)
        if state.step == run.config.max_steps:
            run.request_stop("max_steps", agreed=True)
    for name in results:
        if results[name].skipped:
            phases.refuse_more_skips(run, name, results[name].reason)


def forward_backward(run: Run, micro_batch: MicroBatch) -> None:
    """Accumulate the gradients of one micro-batch; the last backward and `finish` reduce them."""
    with NOTHING if micro_batch.last else run.strategy.no_sync(run.model):
        with run.precision.autocast():
            losses = run.objectives.losses(run.training_step, micro_batch)
        for objective, loss, others_follow in losses:
            objective.backward(loss, is_last=micro_batch.last, retain_graph=others_follow)


def update(run: Run, objective: Objective) -> StepResult:
    """Clip the gradients of an objective and apply them."""
    loss, weight = objective.weighting.result()
    result = StepResult(loss, objective.clip(run.config), weight=weight)
    if objective.closure is None:
        objective.precision.step(objective.optimizer)
    else:  # LBFGS and the like compute loss and gradients again
        objective.optimizer.step(objective.closure)
    if run.lr_schedule is not None:
        run.lr_schedule.advance("step", objective.name)
    objective.optimizer.zero_grad(set_to_none=True)
    if run.logging.is_read:
        of = f"/{objective.name}" if objective.name else ""
        run.logging.sums.add(f"loss{of}", loss, weight)
        if result.grad_norm is not None:
            run.logging.sums.add(f"grad_norm{of}", result.grad_norm)
    return result


def skip(run: Run, objective: Objective, reason: str | None = None) -> StepResult:
    """Clear the gradients of an objective; parameters and schedule stay as they were (rule 9)."""
    loss, weight = objective.weighting.result()
    reason = reason or phases.check_overflow(run, loss, objective.precision)
    objective.optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, skipped=True, reason=reason, weight=weight)


def end_epoch(run: Run, callbacks: CallbackList) -> None:
    """Count the epoch, then serve what its last step and its end ask for, once."""
    state = run.state
    phases.follow_plan(run)
    run.internals.attributes.end_pass()
    if run.lr_schedule is not None:
        run.lr_schedule.advance("epoch")
    state.epoch += 1
    state.epoch_samples = 0
    run.requests.evaluation |= run.evaluation.after_epochs
    callbacks.emit(Callback.on_epoch_end, run)
    if (end := run.end_reached) is not None:
        run.request_stop(end, agreed=True)
    phases.serve(run, callbacks)
