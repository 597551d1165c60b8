"""What surrounds a fit: which call is inside which, the watch, the model's mode and compilation."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainkit import rng
from trainkit.config import TrainConfig
from trainkit.distributed import collective_guard, run_on_all
from trainkit.errors import ConfigError
from trainkit.training.callback import CallbackList
from trainkit.training.run import FitResult, Run

if TYPE_CHECKING:
    from trainkit.config import Watchdog

__all__ = ["Calls", "check_outputs", "compiling", "conditions", "end", "watched"]

MOST_EVALUATIONS = 2
"""How many evaluations that a user calls may be inside each other."""


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

    watch.follow(RunProgress(run, watchdog))
    try:
        yield
    finally:
        watch.unfollow()


@contextmanager
def conditions(
    model: nn.Module, config: TrainConfig, options: Mapping[str, Any] | None
) -> Iterator[None]:
    """Hold what is to hold while a model is trained, and put it back afterwards."""
    with (
        compiling(model, options),
        rng.determinism(config.deterministic),
        _training_mode(model),
        ExitStack() as stack,
    ):
        if config.gradient_checkpointing:
            from trainkit.strategies.activation_checkpointing import checkpoint_activations
            from trainkit.strategies.blocks import find_blocks  # most runs need neither

            stack.callback(checkpoint_activations(model, find_blocks(model).values()))
        yield


def compiling(model: nn.Module, options: Mapping[str, Any] | None) -> AbstractContextManager[None]:
    """Return what lets a model run compiled inside, where there are options for it."""
    if options is None:
        return nullcontext()
    from trainkit.training.compile import compiled  # most runs need none of it

    return compiled(model, options)


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model that was left in evaluation mode into training mode, and back afterwards.

    One in training mode is left alone, so that submodules which the user froze stay frozen.
    """
    if model.training:
        yield
        return
    model.train()
    try:
        yield
    finally:
        model.eval()


def check_outputs(run: Run, callbacks: CallbackList) -> None:
    """Raise, on all processes, where something that will be written cannot be."""

    def check() -> None:
        if run.output_dir is not None and run.is_main_process:
            from trainkit.outputs import check_folder  # many runs write nothing

            check_folder(run.output_dir, "`Trainer(output_dir=...)`")
        for callback in callbacks.writers:
            callback.check_output(run)

    processes = run.strategy.processes
    run_on_all(processes, check)
    if run.output_dir is not None and processes.size > 1:
        from trainkit.distributed.shared_folder import check_shared  # one process needs none of it

        check_shared(processes, run.output_dir, "`Trainer(output_dir=...)`")


def end(run: Run) -> FitResult:
    """Return what a training came to, its best weights in the model if wanted; raise a signal."""
    if run.requests.signal:
        raise run.interruption()
    result, saver = run.result(), run.checkpoints.saver
    if saver is not None and (best := saver.find_best()) is not None:
        path, step, value = best
        result = replace(result, best_checkpoint=Path(path), best_step=step, best_value=value)
    if run.checkpoints.restore_best:
        from trainkit.training.saved_weights import restore_best  # most runs need none of it

        restore_best(run, result)
    return result
