"""Between two log points nothing reads the device (rule 36).

Reads are refused in two places: in Python, the methods of tensors that bring values to the host;
and in torch's dispatcher, every operator whose result depends on values (`item`, `bool`, `equal`,
`nonzero`, a mask as index), from wherever it is called. On a GPU each of them waits for it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import trainkit
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Alternating, Callback, Run, StepOutput, StepResult, Trainer
from trainkit.callbacks import LRMonitor, NaNGuard
from trainkit.types import Scalars

STEPS, LOG_EVERY, BATCH = 15, 5, 4
SAMPLES = 400  # more than any case uses
READS = ("item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__float__", "__int__")
WAITS = [
    (torch.cuda, "synchronize"),
    (torch.accelerator, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
]
BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Flags over the CPU group: no tensor of the device, and it has arrived.
ON_THE_HOST = str(Path(trainkit.__file__).parent / "distributed" / "async_flags.py")


class HostSync(AssertionError):
    """Something would have waited for the device."""


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses whatever would wait for an accelerator, while it is armed.

    Args:
        allowed: Reads that are let through; they are counted.
    """

    def __init__(self, *, allowed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.armed = False
        self.reads = 0
        self._allowed = allowed

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.armed and BY_VALUE & set(func.tags) and not _is_static_index(func, args):
            self.note(str(func))
        return func(*args, **kwargs or {})

    def note(self, what: str) -> None:
        """Count a read or refuse it."""
        if sys._getframe(2).f_code.co_filename == ON_THE_HOST:
            return
        self.reads += 1
        if not self._allowed:
            raise HostSync(what)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace what brings values to the host by what asks the guard first."""
        with pytest.MonkeyPatch.context() as patch, self:
            for name in READS:
                patch.setattr(Tensor, name, self._asking(name, getattr(Tensor, name)))
            patch.setattr(Tensor, "to", self._asking("to", Tensor.to, _is_to_host))
            for owner, name in WAITS:
                patch.setattr(owner, name, self._asking(name, getattr(owner, name)))
            yield

    def _asking(
        self, name: str, original: Any, matters: Callable[..., bool] = lambda *_: True
    ) -> Any:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if not self.armed or not matters(*args, *kwargs.values()):
                return original(*args, **kwargs)
            self.note(name)
            self.armed = False  # the read itself comes through the dispatcher
            try:
                return original(*args, **kwargs)
            finally:
                self.armed = True

        return ask


def _is_static_index(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether this is an index by numbers: only masks have as many results as are true."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    return all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1])


def _is_to_host(tensor: Tensor, *args: Any) -> bool:
    """Return whether `to` is a copy to the host, and not to where another tensor lies."""
    return any(argument == "cpu" for argument in args if isinstance(argument, str))


class BetweenLogs(Callback):
    """Arms the guard but for set-up, the first steps and the log steps; logs what users log."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.logged: list[Scalars] = []
        self.armed_steps = 0

    @override
    def on_step_start(self, run: Run) -> None:
        self.guard.armed = run.state.step >= LOG_EVERY

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.log({"twice the loss": result.loss * 2, "steps": 1})
        run.log({"largest": result.loss}, reduce="max")
        self.armed_steps += self.guard.armed
        if run.is_log_step:
            self.guard.armed = False

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        self.logged.append(values)


class ByToken(Trainer):
    """A trainer whose step knows the weight of its loss, as a tensor."""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets)
        return StepOutput(loss, weight=(targets[:, 0] > 0).sum())


class ByName(Trainer):
    """Has two optimizers, and gives each a loss."""

    @override
    def configure_optimizers(self, model: Any, optimizers: Any) -> dict[str, SGD]:
        parts = {"first": model[0], "last": model[3]}
        return {name: SGD(part.parameters(), lr=1e-3) for name, part in parts.items()}

    @override
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(self.run, Run)
        self.run.optimize("first", _mean_error(model, batch))
        self.run.optimize("last", _mean_error(model, batch))


class InTurns(ByName):
    """Has a step for each."""

    @override
    def configure_optimizers(self, model: Any, optimizers: Any) -> Any:
        made = super().configure_optimizers(model, optimizers)
        return Alternating(made, {"first": 2, "last": 1})

    def training_step_first(self, model: nn.Module, batch: Any) -> Tensor:
        return _mean_error(model, batch)

    training_step_last = training_step_first


def _mean_error(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _fit(
    guard: Guard,
    make: type[Trainer] = Trainer,
    callbacks: Sequence[type[Callback]] = (),
    **options: Any,
) -> BetweenLogs:
    """Train under the guard; what it sees raises."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 1))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    between = BetweenLogs(guard)
    trainer = make(
        max_steps=STEPS,
        log_every_n_steps=LOG_EVERY,
        callbacks=[between, *(callback() for callback in callbacks)],
        **options,
    )
    with guard.watching():
        result = trainer.fit(
            model,
            DataLoader(data, batch_size=BATCH, shuffle=True),
            optimizer=partial(SGD, lr=1e-3, momentum=0.9),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            loss_fn=nn.functional.mse_loss,
        )
    assert result.step == STEPS
    assert len(between.logged) == STEPS // LOG_EVERY
    assert between.armed_steps == STEPS - LOG_EVERY
    return between


ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 3}
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.5, "max_grad_value": 0.1}
CASES: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "fp32": (Trainer, {}),
    "bf16": (Trainer, {"precision": "bf16"}),
    "clipping": (Trainer, CLIPPED),
    "accumulation": (Trainer, ACCUMULATED),
    "token weights": (ByToken, ACCUMULATED),
    "callbacks": (Trainer, {"callbacks": (NaNGuard, LRMonitor)} | CLIPPED),
    "by name": (ByName, CLIPPED),
    "in turns": (InTurns, {"callbacks": (NaNGuard,)} | CLIPPED),
    "all": (ByToken, {"precision": "bf16"} | ACCUMULATED | CLIPPED),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_reads_the_device_between_logs(case: str) -> None:
    make, options = CASES[case]
    _fit(Guard(), make, **options)


def test_fp16_reads_once_a_step() -> None:
    guard = Guard(allowed=True)
    between = _fit(guard, precision="fp16", **CLIPPED)
    assert guard.reads == between.armed_steps


def _rank(rank: int, case: str) -> int:
    make, options = CASES[case]
    return _fit(Guard(), make, strategy="ddp", **options).armed_steps


@pytest.mark.parametrize("case", with_few(["all"], ["fp32", "clipping", "token weights", "all"]))
def test_nothing_reads_the_device_between_logs_on_two_processes(case: str) -> None:
    assert run_ranks(2, _rank, case) == [STEPS - LOG_EVERY] * 2


READ: dict[str, Callable[[Tensor], object]] = {
    **{name: methodcaller(name) for name in ("item", "tolist", "numpy", "cpu", "nonzero")},
    "to": methodcaller("to", "cpu"),
    "float": float,
    "bool": bool,
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "mask": lambda tensor: tensor.new_ones(2)[torch.tensor([True, False])],
    "norm": lambda tensor: nn.utils.get_total_norm([tensor], error_if_nonfinite=True),
    "wait": lambda _: torch.accelerator.synchronize(),
}


@pytest.mark.parametrize("how", READ)
def test_the_guard_sees(how: str) -> None:
    class Reads(Callback):
        def on_step_end(self, run: Run, result: StepResult) -> None:
            if run.state.step == LOG_EVERY + 1:
                READ[how](result.loss)

    with pytest.raises(HostSync):
        _fit(Guard(), callbacks=[Reads])
