"""What hooks of the user's in a model remember is not moved by the rehearsal, and comes back."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader

from tests.helpers.callbacks import StopsAt
from tests.helpers.toys import FEATURES, toy_dataset
from trainkit import Trainer
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
