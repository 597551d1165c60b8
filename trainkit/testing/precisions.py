"""The contract of precisions."""

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.precision import FP32, Precision
from trainkit.testing import task
from trainkit.testing.processes import on_processes

MakePrecision = Callable[[], Precision]

STEPS = 2 * task.STEPS_PER_EPOCH
CLOSE = 0.1  # relative; two bytes hold a number to 0.4 %, and errors add up


def check_precision(
    make_precision: MakePrecision,
    *,
    processes: Sequence[int] = (1, 2),
    timeout_seconds: float = 120.0,
) -> None:
    """Check every promise of the `Precision` interface, by training on real processes.

    A precision is tried on a network with parameters in fp32, on the CPU.

    Args:
        make_precision: Returns a new precision; called many times, in every process.
        processes: With how many processes to train.
        timeout_seconds: For each number of processes.

    Raises:
        AssertionError: A promise is broken; says which.
    """
    for size in processes:
        with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
            arguments = (make_precision, size, Path(folder))
            results = on_processes(size, _observe, *arguments, timeout_seconds=timeout_seconds)
        assert task.same(results), (
            f"On {size} processes, weights or precision states differ between processes. What is "
            "random in a precision must be drawn alike on all."
        )


def _observe(rank: int, make_precision: MakePrecision, size: int, folder: Path) -> Any:
    if size == 1:
        _check_gradients(make_precision())
        _check_overflow(make_precision())
    batch, used, record, plain = (
        task.GLOBAL_BATCH // size,
        make_precision(),
        task.Record(),
        task.Record(),
    )
    model = task.train(batch, [record], precision=used, dtype=torch.float32)[-1]
    task.train(batch, [plain], precision=FP32(), dtype=torch.float32)
    task.check_state(used, _set_up(make_precision()), "precision")
    dtypes = {str(p.dtype) for p in model.parameters()}
    assert dtypes == {"torch.float32"}, (
        f"The parameters came as float32 and left as {sorted(dtypes)}: a precision must leave "
        "their dtype as it was."
    )
    assert record.hooks["on_step_end"] >= STEPS - 2, "More than two steps were skipped."
    norm, expected = record.norms[0], plain.norms[0]  # clipping acts on gradients of true size
    assert abs(norm - expected) <= CLOSE * expected, (
        f"The norm of the first step's gradients is {norm}, but {expected} in fp32."
    )
    assert all(map(math.isfinite, record.losses)), "Losses are not finite."
    assert record.losses[-1] < record.losses[0], "The loss does not fall."
    made: list[Precision] = []

    def options() -> dict[str, Any]:
        made.append(make_precision())
        return {"precision": made[-1], "dtype": torch.float32}

    return [task.check_resume("a precision", batch, folder, options), made[0].state_dict()]


def _set_up(precision: Precision) -> Precision:
    precision.setup(torch.device("cpu"))
    return precision


def _backward(precision: Precision, model: nn.Module, factor: float = 1.0) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = next(iter(task.loaders(task.GLOBAL_BATCH, torch.float32)[1]))
    with precision.autocast():
        loss = nn.functional.cross_entropy(model(inputs), targets) * factor
    precision.backward(loss)
    return optimizer


def _agree(overflow: Tensor) -> Tensor:
    return overflow


def _check_gradients(precision: Precision) -> None:
    """Check that after `unscale` gradients have their true size, in accumulation too."""
    gradients = _gradients(_set_up(precision))
    expected = _gradients(_set_up(FP32()))
    error = float((gradients - expected).norm() / expected.norm())
    assert error <= CLOSE, (
        f"After two backwards and `unscale`, gradients are off from those of fp32 by the relative "
        f"error {error:.2g}, more than {CLOSE}. `unscale` must undo what `backward` scaled."
    )


def _gradients(precision: Precision) -> Tensor:
    model = task.Network(torch.float32)
    _backward(precision, model)
    optimizer = _backward(precision, model)
    overflowed = precision.unscale(optimizer, _agree)
    assert overflowed is False, (
        f"`unscale` must return False where gradients are finite, but returned {overflowed!r}."
    )
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _check_overflow(precision: Precision) -> None:
    """Check that a precision which scales the loss reports an overflow and gets over it."""
    model, plain = task.Network(torch.float32), task.Network(torch.float32)
    optimizer = _backward(_set_up(precision), model)
    _backward(_set_up(FP32()), plain)
    scaled, true = model.last.bias.grad, plain.last.bias.grad
    assert scaled is not None
    assert true is not None
    if float(scaled.norm() / true.norm()) < 2:
        return  # it scales nothing, so a gradient that is not finite is not its affair
    precision.unscale(optimizer, _agree)
    optimizer.zero_grad()
    optimizer = _backward(precision, model, factor=math.inf)
    assert precision.unscale(optimizer, _agree) is True, (
        "The gradients overflowed, but `unscale` did not return True: a step would be applied "
        "that ruins the weights."
    )
    optimizer.zero_grad()
    optimizer = _backward(precision, model)
    assert precision.unscale(optimizer, _agree) is False, "An overflow is still reported later."
