"""What surrounds a fit: calls inside calls, the watch, compilation, its end."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from trainkit.basics import rng
from trainkit.basics.signals import Interrupted, is_interactive, signal_name
from trainkit.data import PreparedLoader
from trainkit.distributed import collective_guard
from trainkit.errors import ConfigError
from trainkit.lazy import ask
from trainkit.strategies import Strategy
from trainkit.training.callback_list import CallbackList
from trainkit.training.logging import Log
from trainkit.training.run import Run
from trainkit.training.run_parts import FitResult
from trainkit.training.setup.arguments import FitSettings
from trainkit.training.weighting import Weighting

if TYPE_CHECKING:
    from trainkit.basics.config import Watchdog

MOST_EVALUATIONS = 2
"""How many evaluations that a user calls may be inside each other."""


def make_weighting(
    loader: PreparedLoader,
    accumulation: int,
    strategy: Strategy,
    module: nn.Module,
    log: Log,
    of: str = "",
) -> Weighting:
    """Return what weighs the losses of a loader, or of several; see `Weighting`."""
    kind: type[Weighting] = Weighting
    if loader.parts:
        from trainkit.training.several.combined_weighting import (
            CombinedWeighting as kind,  # few have it
        )

    return kind(
        strategy,
        module,
        log,
        nominal=loader.nominal_window(accumulation),
        accumulation=accumulation,
        rows_vary=loader.rows_vary,
        of=of,
    )


class Calls:
    """What was called and has not returned, from the outermost on."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Be inside the call `name`; refuse it, before anything happens, where it cannot work.

        Raises:
            ConfigError: Other calls are under way that do not allow this one.
            DistributedError: Not all processes run the code that makes it.
        """
        collective_guard.check(name)
        outer = self.names
        if name == "fit" and outer:
            raise ConfigError(
                f"`fit` was called inside `{outer[-1]}` of the same trainer, whose model, "
                "optimizer and callbacks are in use. Make another `Trainer` for it, or call it "
                "afterwards. `evaluate` and `predict` may be called inside."
            )
        if len(outer) - outer.count("fit") == MOST_EVALUATIONS:
            chain = " inside ".join(f"`{call}`" for call in (name, *reversed(outer)))
            raise ConfigError(
                f"{chain}: it looks as if `evaluation_step` called this for ever. Call the model "
                "in it instead, or use another `Trainer`."
            )
        self.names = (*outer, name)
        try:
            yield
        finally:
            self.names = outer


@contextmanager
def watched(run: Run, watchdog: "Watchdog | None") -> Iterator[None]:
    """Watch the progress of a run, where it runs on several processes (rule 32)."""
    watch = run.strategy.processes.watch
    if watch is None:
        yield
        return
    from trainkit.training.failure import RunProgress  # one process alone needs none of it

    with watch.following(RunProgress(run, watchdog)):
        yield


@contextmanager
def conditions(run: Run, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Hold what is to hold while a model is trained, and put it back afterwards."""
    model, config = run.module, run.config
    with compiling(model, options), rng.determinism(config.deterministic), ExitStack() as stack:
        stack.callback(run.precision.convert(model))
        if config.gradient_checkpointing:
            from trainkit.strategies.activation_checkpointing import checkpoint_activations
            from trainkit.strategies.blocks import find_blocks  # most runs need neither

            blocks = find_blocks(model).values()
            stack.callback(checkpoint_activations(model, blocks, config.gradient_checkpointing))
        yield


def compiling(model: nn.Module, options: Mapping[str, Any] | None) -> AbstractContextManager[None]:
    """Return what lets a model run compiled inside, where there are options for it."""
    if options is None:
        return nullcontext()
    from trainkit.training.setup.compile import compiled  # most runs need none of it

    return compiled(model, options)


def close(run: Run) -> None:
    """Give back the strategy's wrapper; a second fit makes its own."""
    run.internals.streams = rng.state_dict(run.strategy.device)
    if run.checkpoints.saver is not None:
        run.checkpoints.saver.close()
    run.objectives.close()
    run.clock.enter("done")


def end(run: Run) -> FitResult:
    """Return what a training came to, its best weights in the model if wanted; raise a signal."""
    saver = run.checkpoints.saver
    if signum := run.requests.signal:
        # Somebody who goes on typing, as in a notebook, has only asked the training to end.
        goes_on = signum == signal.SIGINT and is_interactive()
        saved = f"checkpoint `{run.checkpoint}`" if saver else "nothing saved"
        message = f"trainkit: ended by {signal_name(signum)} at step {run.state.step}, {saved}."
        message += " The model holds the weights of this step." if goes_on else ""
        if sys.stderr is not None:
            run.print(message, file=sys.stderr)
        if not goes_on:
            raise Interrupted(signum, message)
    result = FitResult(
        step=run.state.step,
        skipped_steps=run.state.skipped_steps,
        epoch=run.state.epoch,
        samples_seen=run.state.samples_seen,
        metrics=dict(run.metrics),
        best_metrics=dict(run.best_metrics),
        stop_reason=run.stop_reason or "",
        output_dir=run.output_dir,
        checkpoint=run.checkpoint,
    )
    if saver is not None and (best := saver.find_best()) is not None:
        path, step, value = best
        result = replace(result, best_checkpoint=Path(path), best_step=step, best_value=value)
    if run.checkpoints.restore_best:
        from trainkit.training.resume.saved_weights import restore_best  # most runs need none of it

        restore_best(run, result)
    return result


class Course(AbstractContextManager[Any], Protocol):
    """How a fit begins and ends; what is between is done inside of it."""

    def begin(
        self, run: Run, callbacks: CallbackList, new_run: bool
    ) -> tuple[str | Path | None, CallbackList]:
        """Choose where a run writes; return what it resumes, and its callbacks."""

    def end(self, run: Run) -> FitResult:
        """Return what a run came to that has ended."""


class AsAsked(nullcontext[None]):
    """The course of a fit that is what its caller asked for."""

    def __init__(self, resume: str | Path | None) -> None:
        super().__init__()
        self._resume = resume

    def begin(
        self, run: Run, callbacks: CallbackList, new_run: bool
    ) -> tuple[str | Path | None, CallbackList]:
        """Begin where it was asked for, with the callbacks that were given."""
        from trainkit.training.setup.run_folder import choose_folder

        return choose_folder(run, self._resume, new_run), callbacks

    def end(self, run: Run) -> FitResult:
        """End as every training does."""
        return end(run)


def course_of(settings: FitSettings) -> Course:
    """Return the course of a `fit`; a replay where the program was started for one."""
    if "TRAINKIT_REPLAY" not in os.environ:
        return AsAsked(settings.resume)
    replay: Course = ask("Replay").started()
    return replay
