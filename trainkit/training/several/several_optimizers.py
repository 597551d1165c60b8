"""The step of a training with several optimizers: each has its own losses, scale and clipping.

Its counterpart for one optimizer is `train_step` of `loop.py`, which also takes the steps of
several that share one loss.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from trainkit.basics.torch_internals import compiled_call
from trainkit.data import MicroBatch, Window
from trainkit.distributed.collectives import require_equal
from trainkit.errors import ConfigError, by_process
from trainkit.strategies import Strategy
from trainkit.training import loop
from trainkit.training.callback import Callback, CallbackList
from trainkit.training.lr_schedule import LRSchedules
from trainkit.training.phases import check_reached
from trainkit.training.run import Run
from trainkit.training.several.optimizers import NamedOptimizer, Optimizers
from trainkit.types import StepResult

__all__ = ["train_step"]

_NOTHING: AbstractContextManager[object] = nullcontext()


def train_step(run: Run, callbacks: CallbackList, window: Window) -> None:
    """Accumulate the gradients of a window by optimizer, then update each that has a loss."""
    optimizers, state = _optimizers(run), run.state
    if optimizers.together:
        loop.train_step(run, callbacks, window)
        _count_together(run, optimizers)
        return
    callbacks.emit(Callback.on_step_start, run)
    run.strategy.share_buffers(run.module)  # for all forwards of the window
    turn = optimizers.turn(state.attempts)
    results: dict[str, StepResult] = {}
    with _NOTHING if turn is None else only(run.module, turn.parameter_names):
        chosen = accumulate(run, callbacks, window, turn)
        for each in chosen:
            with _NOTHING if turn is not None else only(run.module, each.parameter_names):
                overflowed = reduce_and_unscale(run, each)
            if overflowed:
                results[each.name] = skip(run, each)
    left = [each for each in chosen if each.name not in results]
    if left:
        callbacks.emit(Callback.on_gradients, run)
    state.epoch_samples += run.weighting.samples
    state.samples_seen += run.weighting.samples
    asked, run.requests.skip = run.requests.skip, None
    loss, weight = run.weighting.result()
    for each in left:
        results[each.name] = update(run, each) if asked is None else skip(run, each, asked)
    end_window(run, callbacks, results, loss, weight)
    for each in chosen:
        if (reason := results[each.name].reason) is not None:
            run.refuse_more_skips(reason, each)


def end_window(
    run: Run,
    callbacks: CallbackList,
    results: Mapping[str, StepResult],
    loss: Tensor,
    weight: Tensor | float,
) -> None:
    """Count a window, and tell what came of it."""
    optimizers, state = _optimizers(run), run.state
    result = StepResult(loss, skipped=all(each.skipped for each in results.values()))
    if result.skipped:
        result.reason = " and ".join(dict.fromkeys(str(r.reason) for r in results.values()))
    if optimizers.together:  # as this first window has shown
        result.grad_norm = results[""].grad_norm
    else:
        result.optimizers = results
    state.step += not result.skipped
    state.skipped_steps += result.skipped
    state.consecutive_skips = state.consecutive_skips + 1 if result.skipped else 0
    if optimizers.together:
        _count_together(run, optimizers)
    if result.skipped:
        callbacks.emit(Callback.on_step_skipped, run, result)
        return
    if run.logging.is_read:
        run.logging.sums.add("loss", loss, weight)
        if result.grad_norm is not None:
            run.logging.sums.add("grad_norm", result.grad_norm)
    callbacks.emit(Callback.on_step_end, run, result)
    if state.step == run.config.max_steps:
        run.request_stop("max_steps", agreed=True)


def accumulate(
    run: Run, callbacks: CallbackList, window: Window, turn: NamedOptimizer | None
) -> list[NamedOptimizer]:
    """Accumulate the gradients of a window; return the optimizers that have some."""
    chosen: list[NamedOptimizer] = []
    samples = 0
    for micro_batch in window:
        run.logging.samples = micro_batch.count
        samples += micro_batch.count
        if micro_batch.count == 0:
            with run.as_zero_weight():
                forward_backward(run, window, micro_batch, turn, chosen)
        else:
            callbacks.emit(Callback.on_microbatch_start, run, micro_batch.data)
            forward_backward(run, window, micro_batch, turn, chosen)
            callbacks.emit(Callback.on_microbatch_end, run, micro_batch.data)
    run.logging.samples = None
    for each in chosen:
        trained = [p for p in each.parameters if p.requires_grad]
        is_first = each.steps + each.skipped_steps == 0
        if is_first and samples and trained and all(p.grad is None for p in trained):
            raise ConfigError(
                f"The loss of the optimizer `{each.name}` reaches none of its parameters: its "
                "update would change nothing. Compute it from what they compute, not detached, or "
                "give it to the optimizer that is meant."
            )
    return chosen


def forward_backward(
    run: Run,
    window: Window,
    micro_batch: MicroBatch,
    turn: NamedOptimizer | None,
    chosen: list[NamedOptimizer],
) -> None:
    """Accumulate the gradients of one micro-batch, with one backward for each optimizer.

    Args:
        run: The run.
        window: Of the micro-batch.
        micro_batch: What the step sees.
        turn: Whose turn it is; None: the step says whose losses it gives.
        chosen: The optimizers of this window; its first micro-batch adds them.
    """
    with run.strategy.no_sync(run.model), run.precision.autocast():
        outputs = _outputs(run, micro_batch, turn)
        if not chosen:
            chosen += _choose(run, window, turn, [*outputs])
        if outputs.keys() != {each.name for each in chosen}:
            raise ConfigError(
                f"`run.optimize` was called for {_listed(outputs)} in one micro-batch and for "
                f"{_listed([each.name for each in chosen])} in another one of the same window "
                f"(after step {run.state.step}). Give losses to the same optimizers in all "
                "micro-batches of a window, of weight 0 where there is nothing to learn."
            )
        losses = [
            (each, each.weighting.weigh(outputs.pop(each.name), micro_batch)) for each in chosen
        ]

    def alone(each: NamedOptimizer) -> AbstractContextManager[object]:
        return _NOTHING if turn is not None else only(run.module, each.parameter_names)

    while losses:
        each, loss = losses.pop(0)

        def run_backward(loss: Tensor, each: NamedOptimizer = each, **options: Any) -> None:
            # Entered for each backward: before it, sharded parameters are whole, or they are not.
            with alone(each):
                each.precision.backward(loss, **options)

        model = each.model or run.module
        if micro_batch.last and run.strategy.processes.size > 1:
            with alone(each):
                run.strategy.begin_reduction(model)
        with _NOTHING if micro_batch.last else run.strategy.no_sync(model):
            # Those that follow share what was computed.
            each.weighting.backward(loss, run_backward, retain_graph=bool(losses))


def _outputs(run: Run, micro_batch: MicroBatch, turn: NamedOptimizer | None) -> dict[str, Any]:
    """Return the losses that the step gave, by optimizer; under "" one for all of them."""
    model, optimizers = run.strategy.unwrap(run.model), _optimizers(run)
    if turn is not None:
        assert turn.training_step is not None
        return {turn.name: turn.training_step(model, micro_batch.data)}
    optimizers.losses = {}
    try:
        output = run.training_step(model, micro_batch.data)
    finally:
        losses, optimizers.losses = optimizers.losses, None
    if not losses:
        if output is None or optimizers.together is False:
            raise ConfigError(
                f"`training_step` optimized nothing: it returned {type(output).__name__!r} and "
                "called no `run.optimize`"
                + ("" if output is None else ", as it did before")
                + ". Give it the loss of each optimizer in every window of at least one, or always "
                "return one loss for all."
            )
        return {"": output}
    if isinstance(output, Mapping) and "loss" not in output:
        run.log(output)
    elif output is not None:
        raise ConfigError(
            f"`training_step` called `run.optimize` and returned {type(output).__name__!r} too. "
            "Return nothing, or a mapping of values to log, in which `loss` is none."
        )
    given = {name: losses[name] for name in optimizers.by_name if name in losses}
    return {name: own.get("", own) for name, own in given.items()}  # one, or those by loader


def _choose(
    run: Run, window: Window, turn: NamedOptimizer | None, names: list[str]
) -> list[NamedOptimizer]:
    """Return the optimizers of a window, once all processes have said the same."""
    optimizers = _optimizers(run)
    if turn is None:
        parameters = {name: optimizers.by_name[name].parameters for name in names if name}
        trained = [[p.requires_grad for p in own] for own in parameters.values()]
        require_equal(run.strategy.processes, (names, trained), _differ)
    optimizers.together = names == [""]
    if optimizers.together:
        chosen = [_all_as_one(run, optimizers)]
    else:
        if turn is None and _allows_one_backward(run):
            raise ConfigError(
                "`run.optimize` makes a backward for each optimizer, with the parameters of the "
                "others frozen. Neither a compiled model nor activation checkpointing allows that. "
                "Let the optimizers take turns by `Alternating`, which freezes them in the forward "
                "too, or leave `compile` and the checkpointing out."
            )
        chosen = [optimizers.by_name[name] for name in names]
        # What reduces the gradients of all is not needed: each optimizer reduces its own.
        wrapped, run.model = run.model, run.strategy.unwrap(run.model)
        by_forward = type(run.strategy).finish_reduction is Strategy.finish_reduction
        if by_forward and run.model is not wrapped:
            raise ConfigError(
                f"`{type(run.strategy).__name__}` does not say how gradients are reduced where the "
                "module that it puts around the user's is not called. Override `finish_reduction`."
            )
        run.weighting = _Weightings(chosen)  # type: ignore[assignment]
    for each in chosen:
        each.weighting.begin(window)
        if each.name and len(set(each.parameters)) != len(each.parameter_names):
            raise ConfigError(
                f"The optimizer `{each.name}` has other parameters than when the fit began. "
                "Give each of several optimizers all that it will train from the start, and "
                "freeze by `FreezeUntil` what it is to train later."
            )
    return chosen


def _differ(of_all: Sequence[tuple[list[str], list[list[bool]]]]) -> ConfigError:
    named = [names for names, _ in of_all]
    if any(names != named[0] for names in named):
        return ConfigError(
            "The processes differ in the optimizers that a step gave losses to: "
            f"{by_process([_listed(names) for names in named])}. All must call `run.optimize` for "
            "the same ones."
        )
    of_one = zip(named[0], zip(*(trained for _, trained in of_all), strict=True), strict=True)
    name, trained = next((name, own) for name, own in of_one if any(t != own[0] for t in own))
    frozen = [f"{own.count(False)} of {len(own)}" for own in trained]
    return ConfigError(
        f"The processes differ in which parameters of the optimizer `{name}` are frozen: "
        f"{by_process(frozen)}. Freeze and thaw the same ones on all."
    )


def _all_as_one(run: Run, optimizers: Optimizers) -> NamedOptimizer:
    names = frozenset(name for name, _ in run.module.named_parameters())
    return NamedOptimizer(
        name="",
        optimizer=optimizers,
        precision=run.precision,
        weighting=run.weighting,
        parameter_names=names,
        steps=run.state.step,
        skipped_steps=run.state.skipped_steps,
    )


def _count_together(run: Run, optimizers: Optimizers) -> None:
    for each in optimizers.by_name.values():
        each.steps, each.skipped_steps = run.state.step, run.state.skipped_steps
        each.consecutive_skips = run.state.consecutive_skips


def reduce_and_unscale(run: Run, each: NamedOptimizer) -> bool:
    """Make the gradients of one optimizer final; return whether they overflowed."""
    strategy, parameters = run.strategy, each.parameters
    if each.weighting.reached is not None:
        check_reached(run, each.weighting)
    if each.model is None:
        strategy.check_gradients(run.module)
        each.model = run.model
    if strategy.processes.size > 1:
        each.model = strategy.finish_reduction(each.model, run.precision)
    if (correction := each.weighting.correction()) is not None:
        strategy.scale_gradients(parameters, correction)
    return each.precision.unscale(each.optimizer, strategy.reduce_overflow)


def update(run: Run, each: NamedOptimizer) -> StepResult:
    """Clip the gradients of one optimizer, apply them, and advance what counts its updates."""
    config = run.config
    loss, weight = each.weighting.result()
    result = StepResult(loss)
    if config.max_grad_norm is not None:
        result.grad_norm = run.strategy.clip_grad_norm(each.parameters, config.max_grad_norm)
    if config.max_grad_value is not None:
        run.strategy.clip_grad_value(each.parameters, config.max_grad_value)
    each.precision.step(each.optimizer)
    if isinstance(run.lr_schedule, LRSchedules):
        run.lr_schedule.advance("step", each.name)
    each.optimizer.zero_grad(set_to_none=True)
    each.steps += 1
    each.consecutive_skips = 0
    if run.logging.is_read and each.name:
        run.logging.sums.add(f"loss/{each.name}", loss, weight)
        if result.grad_norm is not None:
            run.logging.sums.add(f"grad_norm/{each.name}", result.grad_norm)
    return result


def skip(run: Run, each: NamedOptimizer, asked: str | None = None) -> StepResult:
    """Clear the gradients of one optimizer and leave everything else of it as it was (rule 9)."""
    loss, _ = each.weighting.result()
    reason = asked or run.overflow(loss, each.precision)
    each.optimizer.zero_grad(set_to_none=True)
    each.skipped_steps += 1
    each.consecutive_skips += 1
    return StepResult(loss, skipped=True, reason=reason)


@contextmanager
def only(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let gradients reach the named parameters alone, also those of forwards made before.

    What was frozen stays so. Where a sharded parameter is whole at the moment, it is that one
    which autograd knows, and which is registered in the module.
    """
    others = [p for name, p in module.named_parameters() if p.requires_grad and name not in names]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


class _Weightings:
    """What is read of a window's weighting, of all its optimizers: the losses are added."""

    def __init__(self, chosen: Sequence[NamedOptimizer]) -> None:
        self._weightings = [each.weighting for each in chosen]

    @property
    def samples(self) -> int:
        """Real samples of the window so far, over all processes."""
        return self._weightings[0].samples

    def result(self) -> tuple[Tensor, Tensor | float]:
        """Return the sum of this process's mean losses, and the weight of the first."""
        (loss, weight), *others = (weighting.result() for weighting in self._weightings)
        for other, _ in others:
            loss = loss + other
        return loss, weight

    def is_finite(self) -> bool:
        """Return whether the latest losses of this process are finite; reads the device."""
        return all(weighting.is_finite() for weighting in self._weightings)


def _optimizers(run: Run) -> Optimizers:
    assert isinstance(run.optimizer, Optimizers)
    return run.optimizer


def _allows_one_backward(run: Run) -> bool:
    """Return whether a backward must be the only one, and find what the forward has seen."""
    recomputes = getattr(run.strategy, "activation_checkpointing", False)
    compiled = any(compiled_call(part) is not None for part in run.module.modules())
    return run.config.gradient_checkpointing or bool(recomputes) or compiled


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) if any(names) else "none, but returned a loss"
