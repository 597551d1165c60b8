"""The contract of strategies."""

import math
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.precision import FP16
from trainkit.strategies import SingleDevice, Strategy
from trainkit.testing import task
from trainkit.testing.processes import on_processes
from trainkit.trainer import Trainer
from trainkit.training.run import Run
from trainkit.types import Batch, StepResult

MakeStrategy = Callable[[], Strategy]

STEPS = 2 * task.STEPS_PER_EPOCH
SPOILED_STEP = 2  # counted from 0; the last full one, which a process may repeat


def check_strategy(
    make_strategy: MakeStrategy,
    *,
    processes: int = 2,
    exact: bool = True,
    tolerance: float = 1e-9,
    timeout_seconds: float = 180.0,
) -> None:
    """Check every promise of the `Strategy` interface, by training on real processes.

    Processes that have less data than others, and none, are part of it.

    Args:
        make_strategy: Returns a new strategy; called many times, in every process.
        processes: How many are started; must divide 12, and leave at least 2 samples to each.
        exact: The strategy is another way to compute what one device would: losses, norms,
            weights and metrics must be equal to those. False where it is an algorithm of its
            own, such as one that compresses gradients: they must only be equal on all processes.
        tolerance: Relative, in fp64; for `exact`.
        timeout_seconds: For all processes together.

    Raises:
        AssertionError: A promise is broken; says which.
    """
    if task.GLOBAL_BATCH % processes or task.GLOBAL_BATCH // processes < 2:
        raise ValueError(f"`processes` must be 1, 2, 3, 4 or 6, but is {processes}.")
    batch = task.GLOBAL_BATCH // processes

    def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return on_processes(
            processes, function, make_strategy, batch, *arguments, timeout_seconds=timeout_seconds
        )

    expected = None
    if exact:  # what one device computes with the same global batches
        alone = partial(SingleDevice, device="cpu")
        expected = on_processes(1, _trainings, alone, task.GLOBAL_BATCH)[0]
    run(_check_no_sync, exact)
    results = run(_trainings)
    for kind in results[0]:
        _check_training(kind, [of[kind] for of in results], expected and expected[kind], tolerance)
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        results = run(_troubles, Path(folder))  # processes that are not in step would hang in it
    _check_overflow([of["overflow"] for of in results])
    for rank, of in enumerate(results):
        assert not of["left"], f"`close` on process {rank} left {of['left']} behind."


def _trainings(rank: int, make_strategy: MakeStrategy, batch: int) -> dict[str, Any]:
    train_by = partial(_train, make_strategy, batch)
    return {
        "plain": train_by(_Unwraps(), gradient_accumulation_steps=1),
        "accumulated, weighted": train_by(_Unwraps(), trainer_class=task.WeightedTrainer),
        "first partly frozen (see `Strategy.finish_reduction`)": train_by(_Thaws()),
    }


def _troubles(rank: int, make_strategy: MakeStrategy, batch: int, folder: Path) -> dict[str, Any]:
    threads = set(threading.enumerate())
    overflow = _overflow(make_strategy, batch)
    options = {"gradient_accumulation_steps": 1}
    task.check_resume("a strategy", batch, folder, lambda: {"strategy": make_strategy(), **options})
    Trainer(max_steps=1, strategy=make_strategy(), callbacks=[]).close()
    left = [thread.name for thread in set(threading.enumerate()) - threads if not thread.daemon]
    if torch.distributed.is_initialized():
        left.append("a process group")
    return {"overflow": overflow, "left": left}


class _Unwraps(task.Record):
    """Checks that the strategy finds the user's module again."""

    @override
    def on_fit_start(self, run: Run) -> None:
        unwrapped = run.strategy.unwrap(run.model)
        assert unwrapped is run.module, (
            f"`unwrap` must return the module that was given to `wrap`, but returned {unwrapped!r}."
        )


class _Thaws(_Unwraps):
    """Trains the first layer only from the middle of an epoch on."""

    @override
    def on_fit_start(self, run: Run) -> None:
        super().on_fit_start(run)
        self._set(run, trains=False)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        super().on_step_end(run, result)
        if run.state.step == task.SAVED_STEP:
            self._set(run, trains=True)

    def _set(self, run: Run, *, trains: bool) -> None:
        run.module.get_submodule("first").requires_grad_(trains)


def _train(
    make_strategy: MakeStrategy, batch: int, record: task.Record, **options: Any
) -> dict[str, Any]:
    trainer, result, model = task.train(batch, [record], strategy=make_strategy(), **options)
    keys, kept = list(task.Network().state_dict()), list(model.state_dict())
    assert kept == keys, f"The keys of the state dict were {keys} and became {kept}."
    return {
        "losses": record.losses,
        "norms": record.norms,
        "hooks": record.hooks,
        "counters": [result.step, result.skipped_steps, result.epoch, result.samples_seen],
        "metrics": result.metrics,
        "again": trainer.evaluate(model, task.loaders(batch)[1]),
        "weights": task.weights(model),
    }


def _check_training(
    kind: str, results: list[dict[str, Any]], expected: dict[str, Any] | None, tolerance: float
) -> None:
    what = f"In {kind} training"
    for key in ("counters", "hooks", "losses", "metrics", "again", "weights"):
        values = [of[key] for of in results]
        assert task.same(values), f"{what}, `{key}` differ between processes: {task.shown(values)}."
    hooks = ("on_step_start", "on_gradients", "on_step_end")
    assert results[0]["hooks"] == dict.fromkeys(hooks, STEPS), f"{what}, hooks are missing."
    assert all(map(math.isfinite, results[0]["losses"])), f"{what}, losses are not finite."
    assert results[0]["losses"][-1] < results[0]["losses"][0], f"{what}, the loss does not fall."
    if expected is None:
        return
    assert task.same([of["norms"] for of in results]), (
        f"{what}, `clip_grad_norm` must return the norm over all processes, equal on each, but "
        f"returned {task.shown([of['norms'] for of in results])}."
    )
    assert results[0]["counters"] == expected["counters"], f"{what}, counters are not as on one."
    for key in ("losses", "norms", "metrics", "again", "weights"):
        error = _distance(results[0][key], expected[key])
        assert error <= tolerance, (
            f"{what}, `{key}` are not those of one device with the same global batch: relative "
            f"error {error:.1e}, allowed are {tolerance:.1e}. Gradients must be averaged over the "
            "processes, once a window; pass `exact=False` if the strategy is another algorithm."
        )


def _distance(found: Any, expected: Any) -> float:
    """Return the largest relative difference between two nestings of numbers."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return math.inf
        return max((_distance(found[key], expected[key]) for key in expected), default=0.0)
    if isinstance(expected, list):
        if len(found) != len(expected):
            return math.inf
        return max(map(_distance, found, expected), default=0.0)
    ours, theirs = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def _overflow(make_strategy: MakeStrategy, batch: int) -> dict[str, Any]:
    """Train in fp16 where one sample, on the last process, spoils one step."""
    model = task.Network(torch.float32)
    watch = _Skips()
    precision = FP16(init_scale=256.0)  # so that nothing else overflows
    trainer = Trainer(
        max_steps=task.STEPS_PER_EPOCH - 1, strategy=make_strategy(), precision=precision,
        callbacks=[watch],
    )  # fmt: skip
    spoiled = (SPOILED_STEP + 1) * task.GLOBAL_BATCH - 1
    result = task.fit(trainer, model, task.loaders(batch, torch.float32, spoiled)[0])
    return {
        "counters": [result.step, result.skipped_steps, result.samples_seen],
        "skips": watch.skips,
        "changed": watch.changed,
        "scale": precision.scale,
        "weights": task.weights(model),
    }


class _Skips(task.Record):
    """Notes at which steps the loop skipped, and whether a skip changed the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.skips: list[int] = []
        self.changed = False
        self._before: dict[str, Tensor] = {}

    @override
    def on_step_start(self, run: Run) -> None:
        self._before = task.weights(run.module)

    @override
    def on_step_skipped(self, run: Run, result: Any) -> None:
        self.skips.append(run.state.step)
        self.changed = not task.same([self._before, task.weights(run.module)])


def _check_overflow(results: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(results):
        assert of["skips"] == [SPOILED_STEP], (
            "The gradient of one process overflowed in fp16, and every process must skip step "
            f"{SPOILED_STEP}; process {rank} skipped {of['skips']}. Where processes hold different "
            "gradients, `reduce_overflow` must take the maximum over all."
        )
        assert not of["changed"], f"A skipped step changed the weights of process {rank}."
        assert of["scale"] == 128.0, f"The loss scale of process {rank} is {of['scale']}, not 128."
    assert task.same([of["counters"] for of in results]), "After a skip, counters differ."
    assert task.same([of["weights"] for of in results]), "After a skip, weights differ."


class _Gradients(task.Record):
    """Keeps the gradients of one parameter, after each micro-batch and when they are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[Tensor] = []
        self.reduced: list[Tensor] = []

    @override
    def on_microbatch_end(self, run: Run, batch: Batch) -> None:
        if len(self.inside) == len(self.reduced):  # the first micro-batch of a window
            self._keep(run, self.inside)

    @override
    def on_gradients(self, run: Run) -> None:
        self._keep(run, self.reduced)

    def _keep(self, run: Run, kept: list[Tensor]) -> None:
        gradient = next(run.module.parameters()).grad
        kept.append(gradient.clone() if type(gradient) is Tensor else torch.empty(0))


def _check_no_sync(rank: int, make_strategy: MakeStrategy, batch: int, reduces: bool) -> None:
    """Check that a window accumulates on its own process, and is reduced at its end."""
    kept = _Gradients()
    trainer = Trainer(
        max_steps=1, strategy=make_strategy(), callbacks=[kept], gradient_accumulation_steps=2
    )
    task.fit(trainer, task.Network(), task.loaders(batch // 2))
    gather = trainer.strategy.processes.all_gather_objects
    inside, reduced = gather(kept.inside[0]), gather(kept.reduced[0])
    if len(inside) == 1 or not inside[0].numel():
        return  # the strategy keeps the gradients of a window to itself
    assert not task.same(inside), (
        "Inside a window each process must keep its own gradients, but they are equal: `no_sync` "
        "reduced them."
    )
    if reduces:
        assert task.same(reduced), "At the end of a window, gradients differ between processes."
