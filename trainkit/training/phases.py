"""What is served between two windows: log, evaluate, checkpoint, stop (rule 5)."""

from __future__ import annotations

import gc
import math
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.distributed.collectives import require_equal
from trainkit.errors import ConfigError, DataError, TrainkitError, by_process, quoted
from trainkit.training.callback import Callback
from trainkit.training.callback_list import CallbackList

if TYPE_CHECKING:
    from trainkit.data import MicroBatch, Window
    from trainkit.precision import Precision
    from trainkit.training.run import Run
    from trainkit.training.weighting import Weighting
    from trainkit.types import Scalars


def begin(run: Run, callbacks: CallbackList) -> None:
    """Put back what `restore` has kept, random streams last; say what cannot work before that."""
    run.internals.attributes.begin(run.strategy.device, run.checkpoint, partial(_draw_order, run))
    if run.checkpoints.resumed_from is not None and run.checkpoint is not None:
        callbacks.emit(Callback.on_checkpoint_loaded, run, run.checkpoint)
    if run.checkpoints.saver is not None:
        from trainkit.training.resume.checkpointing import check_savable  # on demand

        check_savable(run, callbacks)
    saver = run.checkpoints.saver
    if run.checkpoints.restore_best and (saver is None or saver.keep_best is None):
        raise ConfigError(
            "`restore_best=True` leaves the best weights in the model, but nothing says which "
            'those are. Add the callback `Checkpoint(keep_best=("eval/loss", "min"))`.'
        )
    run.internals.left_out = {*_untrained(run)}
    if run.train_loader.stream is not None:
        run.train_loader.stream.check_evaluations(run.evaluation.loaders.values())
    known = asdict(run.config) | {"scheduler": run.lr_schedule and run.lr_schedule.scheduler}
    known |= {"optimizer": run.optimizer, "batch_size": run.train_loader.batch_size}
    run.strategy.check_settings(known)
    if run.strategy.processes.size > 1:
        _check_alike(run)
    if run.lr_schedule is not None:
        from trainkit.training.setup.schedule_check import check_plan  # many runs need none of it

        check_plan(run.lr_schedule, run.planned_steps, run.config.max_epochs, run.print)
        run.lr_schedule.watch(run.evaluation)
    from trainkit.training.setup.rehearsal import rehearse  # only a fit needs it

    run.evaluation.check(rehearse(run), run.print)
    run.internals.restore_streams(run.strategy.device)
    run.clock.enter("train")
    run.stop_reason = run.end_reached  # where a run is resumed that had ended


def _draw_order(run: Run) -> None:
    """Let the sampler give the order of the epoch under way, if it does so now."""
    if run.internals.check_order is not None:
        with suppress(Exception):  # one that is not ready is asked again before the first window
            run.internals.check_order()


def _check_alike(run: Run) -> None:
    """Raise where the processes differ in what is known only now."""
    from trainkit.metrics.function_metric import FunctionMetric  # one process needs none of it
    from trainkit.training.setup.consistency import check_alike
    from trainkit.training.setup.settings import optimizer_settings, settings

    evaluation = run.evaluation
    names = [metric.name for metric in evaluation.metrics]
    when = f"each epoch: {evaluation.after_epochs}, at the end: {evaluation.at_end}"
    plan = f"metrics {names}, {when}"
    by_name = {"their `Evaluation` callbacks": plan}
    for metric in evaluation.metrics:
        if isinstance(metric, FunctionMetric):
            by_name |= dict(settings(f"metrics.{metric.name}", metric.function, whole=False))
    by_name |= dict(settings("lr_scheduler", run.lr_schedule))
    by_name |= dict(optimizer_settings("optimizer", run.optimizer))
    check_alike(run.strategy.processes, by_name.items())


def first_window(run: Run) -> tuple[Generator[Window, None, None], Window | None]:
    """Return the windows of what is left of the epoch, and the first of them."""
    windows = run.windows()
    window = next(windows, None)
    follow_plan(run)
    _say_untrained(run)
    if window is not None and run.state.attempts == 0:
        from trainkit.training.setup.epoch_order import check_order  # only a fit needs these
        from trainkit.training.setup.loss_check import check_loss

        check_order(run)
        check_loss(run, window)
    return windows, window


def check_reached(run: Run, weighting: Weighting) -> None:
    """Raise where the first backward went to parameters that nothing trains (rule 6).

    What an optimizer of the user's own holds is trained in a way of theirs.
    """
    known = {id(parameter) for parameter in (*weighting.parameters, *run.parameters)}
    reached, weighting.reached = weighting.reached or (), None
    strays = [
        leaf
        for leaf in reached
        if isinstance(leaf, nn.Parameter) and leaf.grad is not None and id(leaf) not in known
    ]
    if strays:
        held = _held_by_anybody()
        strays = [parameter for parameter in strays if id(parameter) not in held]
    if not strays:
        return
    trainer = getattr(run.evaluation.evaluator.step, "__self__", None)
    named = {
        id(parameter): f"{holder}.{name}"
        for holder, module in getattr(trainer, "__dict__", {}).items()
        if isinstance(module, nn.Module)
        for name, parameter in module.named_parameters()
    }
    named |= {id(parameter): name for name, parameter in run.module.named_parameters()}
    names = sorted(named.get(id(p), f"one of the shape {tuple(p.shape)}") for p in strays)
    raise ConfigError(
        f"The loss depends on {len(strays)} parameters that nothing would update or save: "
        f"{quoted(names)}. They were not in the model when `fit` began, and no optimizer holds "
        "them. Make them in the constructor of the model; let a loss that learns be a part of the "
        "model (`self.loss_fn = ...` in its constructor, then `fit(..., loss_fn=model.loss_fn)`). "
        "What is not to learn, such as a teacher: `requires_grad_(False)`."
    )


def _held_by_anybody() -> set[int]:
    """Return the `id` of each parameter of any optimizer of the program."""
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    groups = [group for each in optimizers for group in each.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _untrained(run: Run) -> list[str]:
    """Return the names of the trainable parameters of the model that the run's optimizer lacks."""
    held = {id(parameter) for parameter in run.parameters}
    return [n for n, p in run.module.named_parameters() if p.requires_grad and id(p) not in held]


def _say_untrained(run: Run) -> None:
    """Say once which parameters began to train after `fit` had, though nothing updates them."""
    if run.state.attempts == 0 or not (names := {*_untrained(run)} - run.internals.left_out):
        return
    parameters, held = dict(run.module.named_parameters()), _held_by_anybody()
    lost = [n for n in names if parameters[n].grad is not None and id(parameters[n]) not in held]
    if not lost:
        return
    run.internals.left_out |= names
    run.print(
        f"trainkit: {len(lost)} parameters have gradients, but stay as they are: "
        f"{quoted(sorted(lost))}. They were frozen or missing when `fit` began, and no optimizer "
        "holds them. Thaw by `FreezeUntil` what an `optimizer=` of all of them is to train, or "
        'give them to it: `run.optimizer.add_param_group({"params": [...]})`.'
    )


def follow_plan(run: Run) -> None:
    """Plan anew, and say so, where an epoch has another length than was planned (rule 2).

    Every process calls it once an epoch's first window is there, and at the epoch's end.

    Raises:
        DataError: The epoch has not the same length on all processes.
    """
    length = run.train_loader.newly_known_length()
    if length is None:
        return
    require_equal(
        run.strategy.processes,
        f"{length.samples} samples in {length.windows} steps",
        lambda of_all: DataError(
            f"The processes differ in the length of epoch {run.state.epoch}: {by_process(of_all)}. "
            "A data set that grows or shrinks must do so alike on all of them."
        ),
    )
    epochs, planned = run.config.max_epochs, run.planned_steps
    if epochs is None or planned is None:
        return
    later = length.windows * (epochs - run.state.epoch - 1)
    run.planned_steps = run.state.attempts + length.left + later
    if run.planned_steps == planned:
        return
    text = (
        f"trainkit: epoch {run.state.epoch} has {length.windows} steps, so {run.planned_steps} "
        f"steps are planned now, and no longer {planned}."
    )
    if run.lr_schedule is not None and run.lr_schedule.every == "step":
        text += (
            f" The learning-rate schedule stays that of {run.internals.scheduled_steps} planned "
            "steps. Give `max_steps` where it must end with the training."
        )
    run.print(text)


def check_overflow(run: Run, loss: Tensor, precision: Precision) -> str:
    """Return why a window is skipped; raise where its overflow leaves no way on."""
    if precision.exhausted:
        from trainkit.training.finite import low_scale  # most runs need none of it

        named = run.module.named_parameters()
        raise low_scale(run.strategy, named, loss, step=run.state.step)
    return "the gradients overflowed"


def refuse_more_skips(run: Run, name: str, reason: str | None) -> None:
    """Raise where too many windows in a row were skipped, the last one for `reason`.

    Args:
        name: Of one of several optimizers; "" of all.
    """
    skips = run.optimizers.get(name, run.state).consecutive_skips
    limit, of = run.config.max_consecutive_skips, f" for `{name}`" if name else ""
    if skips > limit:
        raise TrainkitError(
            f"{skips} windows in a row were skipped{of}, the last one because {reason}; "
            f"`max_consecutive_skips` is {limit}. Lower the learning rate, look for non-finite "
            "inputs, or use bf16 or fp32."
        )


def serve(run: Run, callbacks: CallbackList) -> None:
    """Serve what is due after a window, or after an epoch; `finish` serves in this order too."""
    requests, flags = run.requests, run.internals.flags
    if flags is not None or run.internals.interrupts.received:
        _read_requests(run)
    stops = requests.stop is not None
    is_new = run.logging.is_read and run.state.step != run.logging.last_step
    if is_new and (run.is_log_step or (stops and not _is_interrupted(run))):
        _write_log(run, callbacks)
    if requests.evaluation or (stops and _lacks_last_evaluation(run)):
        _evaluate(run, callbacks)
    if run.checkpoints.saver is not None:
        _save(run, callbacks)
    if flags is not None and (flags.count_window() or requests.stop is not None):
        requests.send(flags, run.internals.interrupts.received)
    if requests.stop is not None:
        run.stop_reason = requests.stop


def finish(run: Run, callbacks: CallbackList) -> None:
    """Serve what was asked for while the last window was served, and save the last step."""
    run.clock.enter("end")
    _read_requests(run)
    logs = run.logging.is_read and not _is_interrupted(run)
    if logs and run.state.step != run.logging.last_step:
        _write_log(run, callbacks)
    asked = run.requests.evaluation and not run.is_evaluated
    if asked or _lacks_last_evaluation(run):
        _evaluate(run, callbacks)
        # Saved once more with its metrics, or each start of a finished run would evaluate anew.
        run.checkpoints.saved_attempt = -1
    run.strategy.share_buffers(run.module)
    _say_untrained(run)
    if not run.objectives.is_finite():
        run.print(
            "trainkit: the loss of the last step is not finite. `callbacks=[NaNGuard()]` ends a "
            "run where that begins, and says where it comes from."
        )
    if run.checkpoints.saver is not None:
        run.requests.checkpoint |= run.checkpoints.saved_attempt != run.state.attempts
        _save(run, callbacks)
        _note_saved(run, callbacks, run.checkpoints.saver.wait())
    elif not run.is_evaluated:
        _check_replicas(run)
    if logs:
        _write_log(run, callbacks)
    if run.internals.flags is not None:  # a signal may have come since the last window
        run.requests.send(run.internals.flags, run.internals.interrupts.received)
    _read_requests(run)


def _lacks_last_evaluation(run: Run) -> bool:
    """Return whether the last step is to be evaluated and has not been."""
    return run.evaluation.at_end and not run.is_evaluated


def _evaluate(run: Run, callbacks: CallbackList) -> None:
    """Evaluate the model on all loaders, between the evaluation hooks."""
    saver = run.checkpoints.saver
    if saver is not None and saver.weights_only:  # what its weights are compared with must be there
        _note_saved(run, callbacks, saver.wait())
    with run.internals.weights.held(error_is_last=True):
        phase = run.clock.enter("evaluate")
        run.strategy.share_buffers(run.module)
        callbacks.emit(Callback.on_evaluation_start, run)
        _say_untrained(run)
        evaluation = run.evaluation
        _check_replicas(run)

        def announce(batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
            for micro_batch in batches:
                yield micro_batch
                callbacks.emit(Callback.on_evaluation_batch_end, run)

        metrics: Scalars = {}
        for name, loader in evaluation.loaders.items():
            metrics |= evaluation.evaluator.evaluate(
                run.module, loader, evaluation.metrics, name, announce
            )
        # One that comes only because the run stops is no part of the plan that a resume goes on
        # with.
        evaluation.is_planned, run.requests.evaluation = run.requests.evaluation, False
        evaluation.evaluated_attempt = run.state.attempts
        run.metrics = metrics
        evaluation.learn(evaluation.metrics, metrics)
        for name, is_higher_better in evaluation.ends().items():
            if not math.isnan(value := metrics.get(name, math.nan)):
                best = run.best_metrics.get(name, value)
                run.best_metrics[name] = (max if is_higher_better else min)(best, value)
        evaluation.check(metrics, run.print)
        if run.lr_schedule is not None and evaluation.is_planned:
            run.lr_schedule.advance_evaluation(metrics)
        if saver is not None:
            from trainkit.training.resume.checkpointing import save_weights  # as in `_save`

            save_weights(run, callbacks)
        callbacks.emit(Callback.on_evaluation_end, run, metrics)
        run.clock.enter(phase)


def _check_replicas(run: Run) -> None:
    """Raise where the processes hold different models; each save does so by itself."""
    if run.strategy.processes.size > 1 and run.evaluation.check_replicas:
        from trainkit.training.resume.replicas import check_replicas  # one process needs none of it

        parameters = dict(run.module.named_parameters())
        check_replicas(run.strategy, parameters, [run.optimizer], f"after step {run.state.step}")


def _read_requests(run: Run) -> None:
    """Take over what all processes know of; a signal asks for the end, which saves."""
    if run.internals.flags is not None:
        run.requests.read(run.internals.flags, run.strategy.processes)
    elif run.internals.interrupts.received:
        run.requests.signal = run.internals.interrupts.received
    if not run.requests.signal:
        return
    run.requests.stop = f"signal {run.requests.signal}"
    run.evaluation.at_end = False  # whoever sends a signal does not want to wait


def _is_interrupted(run: Run) -> bool:
    """Return whether a signal ends the run too early.

    Its open sums then stay in the checkpoint: the resumed run must log what this one would have.
    """
    return run.requests.signal != 0 and run.end_reached is None


def _save(run: Run, callbacks: CallbackList) -> None:
    """Save a checkpoint if one is due, and tell of one that was committed meanwhile."""
    from trainkit.training.resume.checkpointing import (  # runs without checkpoints need none of it
        collect,
        describe,
    )

    saver = run.checkpoints.saver
    assert saver is not None
    if run.state.step == 1:
        from trainkit.training.resume.checkpointing import check_optimizer_state

        check_optimizer_state(run)
    _note_saved(run, callbacks, saver.poll())
    due, run.requests.checkpoint = run.requests.checkpoint, False
    if not due or run.checkpoints.saved_attempt == run.state.attempts:
        return
    phase = run.clock.enter("save")
    callbacks.emit(Callback.on_checkpoint_start, run)
    _note_saved(run, callbacks, saver.wait())
    stops = run.requests.stop is not None or run.stop_reason is not None
    if stops and run.logging.is_read and not _is_interrupted(run):
        _write_log(run, callbacks)  # what the checkpoint held of it would be written again
    about = describe(run, callbacks)
    with run.evaluation_weights():
        path = saver.save(run.state.step, collect(run, callbacks), about)
    run.checkpoints.saved_attempt = run.state.attempts
    _note_saved(run, callbacks, path)
    run.clock.enter(phase)


def _note_saved(run: Run, callbacks: CallbackList, path: Path | None) -> None:
    if path is not None:
        run.checkpoint = path
        callbacks.emit(Callback.on_checkpoint_saved, run, path)


def _write_log(run: Run, callbacks: CallbackList) -> None:
    """Reduce the values since the last log, and hand them to the callbacks if there are any."""
    run.logging.last_step = run.state.step
    values = run.logging.sums.reduce(run.strategy.data_processes)
    if "loss" in values:
        callbacks.emit(Callback.on_log, run, values)
    elif values:  # logged after the record of the last step
        callbacks.emit(Callback.on_late_log, run, values)
