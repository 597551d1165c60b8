"""What surrounds a fit: calls inside calls, the watch, compilation, where it writes."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from trainkit import rng
from trainkit.config import TrainConfig
from trainkit.data import PreparedLoader
from trainkit.distributed import collective_guard, run_on_all, run_on_main
from trainkit.errors import ConfigError
from trainkit.training import loop
from trainkit.training.callback import CallbackList, Step
from trainkit.training.default_steps import for_each_loader
from trainkit.training.run import FitResult, Run
from trainkit.training.weighting import Weighting

if TYPE_CHECKING:
    from trainkit.config import Watchdog

__all__ = [
    "Calls",
    "check_outputs",
    "choose_folder",
    "compiling",
    "conditions",
    "end",
    "loop_step",
    "make_weighting",
    "step_for",
    "watched",
    "write_apart",
]

MOST_EVALUATIONS = 2
"""How many evaluations that a user calls may be inside each other."""


def step_for(step: Callable[..., Any], loader: PreparedLoader) -> Callable[..., Any]:
    """Return a trainer's step; that of `Trainer` itself takes several loaders one by one."""
    is_default = step.__module__ == "trainkit.trainer"
    return partial(for_each_loader, step) if loader.parts and is_default else step


def make_weighting(
    loader: PreparedLoader, accumulation: int, *parts: Any, of: str = ""
) -> Weighting:
    """Return what weighs the losses of a loader, or of several; see `Weighting`."""
    kind: type[Weighting] = Weighting
    if loader.parts:
        from trainkit.training.combined_weighting import CombinedWeighting as kind  # few have it

    nominal = loader.nominal_window(accumulation)
    return kind(*parts, nominal=nominal, accumulation=accumulation, of=of)


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


def choose_folder(run: Run, resume: str | Path | None, new_run: bool) -> str | Path | None:
    """Choose where a run writes; return what it resumes, which in a dry run is nothing."""
    if run.config.dry_run is not None:
        _keep_nothing(run, resume)
        return None
    if new_run:
        _take_own_folder(run, resume)
    return resume


def _take_own_folder(run: Run, resume: str | Path | None) -> None:
    """Let a run write to a folder of its own in its output directory, the same on all processes."""
    from trainkit.outputs import folder_of_run  # most runs have none

    parent, processes = run.output_dir, run.strategy.processes
    assert parent is not None
    run.output_dir = Path(run_on_main(processes, lambda: str(folder_of_run(parent, resume))))


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
    if run.requests.signal and (stop := run.interruption()) is not None:
        raise stop
    result, saver = run.result(), run.checkpoints.saver
    if saver is not None and (best := saver.find_best()) is not None:
        path, step, value = best
        result = replace(result, best_checkpoint=Path(path), best_step=step, best_value=value)
    if run.checkpoints.restore_best:
        from trainkit.training.saved_weights import restore_best  # most runs need none of it

        restore_best(run, result)
    return result


def _keep_nothing(run: Run, resume: str | Path | None) -> None:
    """Let a dry run write into a folder that goes with the program; nothing is resumed."""
    from trainkit.formatting import count  # only a dry run needs it

    write_apart(run, "dry run")
    many = run.config.dry_run or 1
    tried = "" if resume is None else f" It begins anew: `resume={str(resume)!r}` is not tried."
    run.print(
        f"trainkit: dry run: {count(many, 'step')} of training, {count(many, 'batch')} of each "
        f"evaluation; nothing is kept.{tried}"
    )


def write_apart(run: Run, kind: str) -> None:
    """Let a run write into a folder that goes with the program; every process calls it.

    It is beside the output directory, where all machines see it. Callers may read it after `fit`.
    """
    place = run.output_dir or Path(tempfile.gettempdir())

    def make() -> str:
        above = next(each for each in (place, *place.parents) if each.exists())
        try:
            folder = tempfile.mkdtemp(prefix=f".trainkit-{kind.replace(' ', '-')}-", dir=above)
        except OSError as error:
            raise ConfigError(
                f"A {kind} writes into a folder in `{above}`, but cannot make it: {error}. "
                "Choose another `output_dir`, or make this place writable."
            ) from error
        weakref.finalize(run.processes, shutil.rmtree, folder, ignore_errors=True)
        return folder

    run.scratch = Path(run_on_main(run.strategy.processes, make))
    if run.output_dir is not None:
        run.output_dir = run.place(run.output_dir)


def loop_step(run: Run) -> Step:
    """Return the step of the loop: others with several optimizers, and with closures."""
    from trainkit.training.closure import closure_for

    run.closure = closure = closure_for(run)
    if closure is not None:
        return closure.train_step
    if not run.optimizers:
        return loop.train_step
    from trainkit.training import several_optimizers  # most runs have one

    return several_optimizers.train_step
