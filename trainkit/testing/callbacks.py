"""The contract of callbacks."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import override

from trainkit.checkpoint import check_encodable
from trainkit.testing.processes import on_processes
from trainkit.testing.task import (
    GLOBAL_BATCH,
    STEPS_PER_EPOCH,
    Network,
    Save,
    fit,
    loaders,
    same,
    weights,
)
from trainkit.trainer import Trainer
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Batch

__all__ = ["check_callback"]

MakeCallback = Callable[[], Callback]

SAVED_STEP = STEPS_PER_EPOCH + 2  # in the middle of an epoch
SKIPPED_ATTEMPT = 2
COUNTERS = ("step", "skipped_steps", "epoch", "samples_seen")
FIGURES = ("metrics", "best_metrics", "stop_reason")


def check_callback(
    make_callback: MakeCallback,
    *,
    processes: Sequence[int] = (1, 2),
    changes_training: bool = False,
    timeout_seconds: float = 120.0,
) -> None:
    """Check every promise of the `Callback` interface, by training on real processes.

    The trainings log, evaluate, save, skip a step, resume, and end by an exception, so that every
    hook that the callback has is called.

    Args:
        make_callback: Returns a new callback; called many times, in every process.
        processes: With how many processes to train.
        changes_training: The callback is there to change what is trained, such as one that adds
            noise to gradients; else weights must be those of a training without it.
        timeout_seconds: For each number of processes.

    Raises:
        AssertionError: A promise is broken; says which.
    """
    for size in processes:
        with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
            arguments = (make_callback, size, Path(folder), changes_training)
            found = on_processes(size, _observe, *arguments, timeout_seconds=timeout_seconds)
        assert same(found), f"On {size} processes, results or weights differ between processes."


def _observe(
    rank: int, make_callback: MakeCallback, size: int, folder: Path, changes_training: bool
) -> Any:
    batch = GLOBAL_BATCH // size
    used = make_callback()
    first = _train([used], batch, folder / "first")
    if not changes_training:
        without = _train([], batch, folder / "without")
        ends = [[{name: end[0][name] for name in COUNTERS}, end[1]] for end in (first, without)]
        assert same(ends), (
            f"Training with `{used.name}` ends with {ends[0][0]}, without it with {ends[1][0]}, "
            "or with other weights. A callback must not change what is trained (draw no numbers, "
            "touch no gradients); pass `changes_training=True` if it is there to do so."
        )
    again = _train([used], batch, folder / "again")
    assert same([first, again]), (
        f"A second `fit` with the same `{used.name}` ends otherwise than the first: {again[0]} "
        f"instead of {first[0]}. `on_fit_start` must put back what belongs to one training."
    )
    _check_state(make_callback, used)
    _check_resume(make_callback, batch, folder, first)
    _check_exception(make_callback, batch, folder)
    return first


class _SkipOnce(Callback):
    """Skips one step, so that `on_step_skipped` comes too."""

    @override
    def on_gradients(self, run: Run) -> None:
        if run.state.attempts == SKIPPED_ATTEMPT and not run.state.skipped_steps:
            run.request_skip("the contract wants to see a skip")


def _train(
    callbacks: list[Callback], batch: int, folder: Path, *, resume: Path | None = None
) -> list[Any]:
    """Train, and return the result without its places on disk, and the weights."""
    model = Network(seed=0 if resume is None else 1)
    trainer = Trainer(
        max_epochs=3,
        callbacks=[*callbacks, _SkipOnce(), Save(SAVED_STEP)],
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        log_every_n_steps=2,
        output_dir=folder,
    )
    result = fit(trainer, model, loaders(batch // 2), resume=resume)
    return [{name: getattr(result, name) for name in (*COUNTERS, *FIGURES)}, weights(model)]


def _check_state(make_callback: MakeCallback, used: Callback) -> None:
    state = copy.deepcopy(used.state_dict())
    check_encodable(state, used.name)
    fresh = make_callback()
    fresh.load_state_dict(state)
    assert same([state, fresh.state_dict()]), (
        f"After `load_state_dict`, the `state_dict` of `{used.name}` must be what it was: "
        f"{state!r}, but is {fresh.state_dict()!r}."
    )


def _check_resume(
    make_callback: MakeCallback, batch: int, folder: Path, expected: list[Any]
) -> None:
    straight, resumed = make_callback(), make_callback()
    _train([straight], batch, folder / "straight")
    path = folder / "straight" / "checkpoints" / f"step-{SAVED_STEP:08d}"
    if not path.exists():  # the callback decides itself which checkpoints stay
        return
    end = _train([resumed], batch, folder / "resumed", resume=path)
    assert same([expected, end]), (
        f"A training with `{straight.name}` that was resumed at step {SAVED_STEP} ends with "
        f"{end[0]} instead of {expected[0]}, or with other weights. What a callback remembers "
        "belongs in `state_dict`."
    )


class _Trips(nn.Module):
    """A network whose forward raises after some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.left = 5

    @override
    def forward(self, inputs: Batch) -> Any:
        """Return the logits, or raise."""
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("the contract wants to see an exception")
        return self.network(inputs)


def _check_exception(make_callback: MakeCallback, batch: int, folder: Path) -> None:
    """Check that a callback lets an exception through, in the same form on all processes."""
    callback = make_callback()
    trainer = Trainer(max_epochs=2, callbacks=[callback], output_dir=folder / "exception")
    try:
        fit(trainer, _Trips(), loaders(batch))
    except ArithmeticError:
        return
    raise AssertionError(f"`{callback.name}` hid an exception of the training step.")
