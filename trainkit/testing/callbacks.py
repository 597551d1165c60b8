"""The contract of callbacks."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import override

from trainkit.testing import task
from trainkit.testing.processes import on_processes
from trainkit.trainer import Trainer
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Batch

MakeCallback = Callable[[], Callback]

SKIPPED_ATTEMPT = 2


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
            results = on_processes(size, _observe, *arguments, timeout_seconds=timeout_seconds)
        assert task.same(results), (
            f"On {size} processes, results or weights differ between processes."
        )


def _observe(
    rank: int, make_callback: MakeCallback, size: int, folder: Path, changes_training: bool
) -> Any:
    batch = task.GLOBAL_BATCH // size
    made = [make_callback(), used := make_callback()]
    first = task.check_resume("a callback", batch, folder / "first", lambda: _options([made.pop()]))
    del first["losses"]
    if not changes_training:
        without = _train([], batch, folder / "without")
        kept = ("step", "skipped_steps", "epoch", "samples_seen", "weights")
        ends = [{name: end[name] for name in kept} for end in (first, without)]
        assert task.same(ends), (
            f"Training with `{used.name}` ends with {_words(first)}, without it with "
            f"{_words(without)}, or with other weights. A callback must not change what is trained "
            "(draw no numbers, touch no gradients); pass `changes_training=True` if it is there "
            "to do so."
        )
    again = _train([used], batch, folder / "again")
    assert task.same([first, again]), (
        f"A second `fit` with the same `{used.name}` ends otherwise than the first: "
        f"{_words(again)} instead of {_words(first)}. `on_fit_start` must put back what belongs to "
        "one training."
    )
    task.check_state(used, make_callback(), used.name)
    _check_exception(make_callback, batch, folder)
    return first


def _words(end: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in end.items() if name != "weights"}


class _SkipOnce(Callback):
    """Skips one step, so that `on_step_skipped` comes too."""

    @override
    def on_gradients(self, run: Run) -> None:
        if run.state.attempts == SKIPPED_ATTEMPT and not run.state.skipped_steps:
            run.request_skip("the contract wants to see a skip")


def _options(callbacks: list[Callback]) -> dict[str, Any]:
    return {"callbacks": [*callbacks, _SkipOnce()], "max_epochs": 3, "log_every_n_steps": 2}


def _train(callbacks: list[Callback], batch: int, folder: Path) -> dict[str, Any]:
    _, result, model = task.train(batch, folder=folder, **_options(callbacks))
    return task.outcome(result, model)


class _Trips(nn.Module):
    """A network whose forward raises after some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.network = task.Network()
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
        task.fit(trainer, _Trips(), task.loaders(batch))
    except ArithmeticError:
        return
    raise AssertionError(f"`{callback.name}` hid an exception of the training step.")
