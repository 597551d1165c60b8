"""What a checkpoint cannot hold is found before the work that it would lose."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from trainkit.checkpoint import check_encodable
from trainkit.checkpoint.training_state import named_optimizer_state
from trainkit.distributed import run_on_all
from trainkit.errors import CheckpointError, ConfigError
from trainkit.training.callback import CallbackList
from trainkit.training.run import Run

__all__ = ["check_optimizer_state", "check_savable"]


def check_savable(run: Run, callbacks: CallbackList) -> None:
    """Raise where a save would fail, as far as that is known before the first step.

    Every process must call it. Nothing is copied or written.

    Raises:
        ConfigError: A state holds what has no form in a file; on all processes.
    """
    _check(run, _states(run, callbacks))
    check_optimizer_state(run)


def check_optimizer_state(run: Run) -> None:
    """Raise where the state of the optimizer cannot be saved; it makes it in its first step."""
    _check(run, _optimizer_states(run))


def _states(run: Run, callbacks: CallbackList) -> Iterator[tuple[str, Any]]:
    """Yield the states of a run but for the optimizer's, with the path that leads to each."""
    yield "model", run.module.state_dict()
    for index, group in enumerate(run.optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                yield f'optimizer.param_groups[{index}]["{name}"]', value
    if run.lr_schedule is not None:
        yield "lr_scheduler", run.lr_schedule.scheduler.state_dict()
    yield "precision", run.precision.state_dict()
    for name, part in run.objects.items():
        yield f"objects.{name}", part.state_dict()
    if run.train_loader.stream is not None:
        yield "data.train", run.train_loader.stream.state_dict()
    for callback in callbacks.callbacks:
        with suppress(Exception):  # it may have none yet, before the first step; a save will tell
            yield f"callbacks.{callback.name}", callback.state_dict()


def _optimizer_states(run: Run) -> Iterator[tuple[str, Any]]:
    saved = named_optimizer_state(run.optimizer, dict(run.module.named_parameters()))
    yield "optimizer.other", saved.get("other", {})
    for part in ("state", "parts"):
        for name, values in saved.get(part, {}).items():
            for key, value in values.items():
                yield f'optimizer.state["{name}"]["{key}"]', value


def _check(run: Run, states: Iterator[tuple[str, Any]]) -> None:
    def check() -> None:
        for path, state in states:
            parts = {path: state}
            try:
                if run.strategy.sharded:
                    from trainkit.checkpoint.resharding.sharding import split  # others need none

                    parts, _ = split(parts, 0)
                for part in parts.values():
                    check_encodable(part, path)
            except CheckpointError as error:
                raise ConfigError(
                    f"No checkpoint of this run could be saved: {error} What is no state can be "
                    "kept where no checkpoint looks, such as in an attribute; or leave "
                    "`Checkpoint` out."
                ) from error

    run_on_all(run.strategy.processes, check)
