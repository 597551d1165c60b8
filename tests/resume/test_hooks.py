"""What hooks of the user's in a model remember is not moved by the rehearsal, and comes back."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, SequentialLR
from torch.utils.data import DataLoader

from tests.helpers.callbacks import StopsAt
from tests.helpers.toys import FEATURES, toy_dataset
from trainkit import Callback, Run, Trainer
from trainkit.callbacks import Checkpoint, Evaluation

EPOCHS, CUT = 2, 4  # of six updates each
total = 0.0


class Counts:
    """Is a hook itself, or has one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        self.calls += module.training
        return output * (1 + 0.1 * self.calls)

    def of_gradient(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient / self.calls


def _closures(model: nn.Sequential) -> None:
    def make(scale: int) -> Callable[..., Tensor]:
        calls, seen = 0, list[float]()

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            nonlocal calls
            calls += scale * module.training
            seen.append(output.mean().item()) if module.training else None
            return output + 0.01 * calls + sum(seen[-2:])

        return hook

    for index, layer in enumerate(model):
        layer.register_forward_hook(make(index + 1))


def _global(model: nn.Sequential) -> None:
    def hook(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        global total
        total += inputs[0].sum().item() * module.training
        return (inputs[0] + 0.01 * total,)

    model[0].register_forward_pre_hook(hook)


def _methods(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        parameter.register_hook(Counts().of_gradient)  # type: ignore[no-untyped-call]


def _objects(model: nn.Sequential) -> None:
    for layer in model:
        layer.register_forward_hook(Counts())


def _optimizers(model: nn.Sequential) -> None:
    """As in the tutorial of torch on steps in the backward."""
    optimizers: dict[Tensor, Adam] = {p: Adam([p], lr=0.05) for p in model[0].parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model[0].parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("register", [_closures, _global, _methods, _objects, _optimizers])
def test_what_hooks_remember_is_that_of_a_loop_by_hand(
    register: Callable[[nn.Sequential], None], tmp_path: Path
) -> None:
    def make() -> tuple[nn.Sequential, SGD, DataLoader[Any]]:
        global total
        torch.manual_seed(0)
        total = 0.0
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2))
        register(model)
        return model, SGD(model[2].parameters(), lr=0.1), DataLoader(toy_dataset(24), 4)

    def train(folder: str, *callbacks: Any, resume: Any = None) -> nn.Module:
        model, optimizer, loader = make()
        trainer = Trainer(
            max_epochs=EPOCHS,
            output_dir=tmp_path / folder,
            callbacks=[Evaluation(), Checkpoint(every_n_steps=CUT), *callbacks],
        )
        loss_fn = nn.functional.cross_entropy
        trainer.fit(model, (loader, loader), optimizer=optimizer, loss_fn=loss_fn, resume=resume)
        return model

    by_hand, optimizer, loader = make()
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(by_hand(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    train("stopped", StopsAt(CUT))
    for model in (train("whole"), train("stopped", resume="must")):
        for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_model_trains_and_is_resumed(tmp_path: Path) -> None:
    def train(folder: str, *callbacks: Any, resume: Any = None) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        model = torch.jit.script(nn.Sequential(*layers))
        trainer = Trainer(
            max_steps=6,
            output_dir=tmp_path / folder,
            callbacks=[Checkpoint(every_n_steps=2), *callbacks],
        )
        loss_fn, optimizer = nn.functional.cross_entropy, partial(SGD, lr=0.1)
        loader = DataLoader(toy_dataset(24), 4)
        trainer.fit(model, loader, optimizer=optimizer, loss_fn=loss_fn, resume=resume)
        return model

    train("stopped", StopsAt(2))
    whole, resumed = train("whole").state_dict(), train("stopped", resume="must").state_dict()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def _train(
    folder: Path,
    make: Callable[[nn.Sequential], tuple[SGD, Any]],
    *callbacks: Any,
    resume: Any = None,
) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer, schedule = make(model)
    trainer = Trainer(
        max_epochs=EPOCHS, output_dir=folder, callbacks=[Checkpoint(every_n_steps=CUT), *callbacks]
    )
    trainer.fit(
        model,
        DataLoader(toy_dataset(24), 4),
        optimizer=optimizer,
        lr_scheduler=schedule,
        loss_fn=nn.functional.cross_entropy,
        resume=resume,
    )
    return model


def test_what_hooks_of_an_optimizer_and_functions_of_a_schedule_remember_comes_back(
    tmp_path: Path,
) -> None:
    def make(model: nn.Sequential) -> tuple[SGD, Any]:
        rate, calls, average = 1.0, [0], [p.detach().clone() for p in model.parameters()]

        def before(optimizer: Any, *_: Any) -> None:
            for p, mean in zip(model.parameters(), average, strict=True):
                assert p.grad is not None
                p.grad.mul_(1 + calls[0]).add_(p.detach() - mean)

        def after(optimizer: Any, *_: Any) -> None:
            calls[0] += 1
            for p, mean in zip(model.parameters(), average, strict=True):
                mean.lerp_(p.detach(), 0.1)

        def falling(step: int) -> float:
            nonlocal rate
            rate *= 0.9
            return rate

        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        inner: list[Any] = [LambdaLR(optimizer, falling), LambdaLR(optimizer, lambda step: 0.5)]
        return optimizer, SequentialLR(optimizer, inner, [10])

    whole = _train(tmp_path / "whole", make)
    _train(tmp_path / "stopped", make, StopsAt(CUT))
    resumed = _train(tmp_path / "stopped", make, resume="must")
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Begins(Callback):
    """Sets what a resume brings back."""

    def on_fit_start(self, run: Run) -> None:
        with torch.no_grad():
            run.module.get_parameter("2.bias").data.fill_(0.3)
        run.optimizer.param_groups[0]["lr"] = 0.2


def test_a_callback_that_overwrites_what_came_back_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(model: nn.Sequential) -> tuple[SGD, Any]:
        return SGD(model.parameters(), lr=0.1), None

    _train(tmp_path, make, Begins(), StopsAt(CUT))
    assert "has changed" not in capsys.readouterr().out
    _train(tmp_path, make, Begins(), resume="must")
    said = capsys.readouterr().out
    assert "`on_fit_start` of a callback has changed parameter `2.bias`, which" in said
