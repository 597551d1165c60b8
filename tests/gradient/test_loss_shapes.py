"""What does not fit a loss is said with what it was given."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer
from trainkit.errors import ConfigError

SAMPLES, sgd = 10, partial(SGD, lr=0.1)


def loader(*shape: int, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(SAMPLES, 4), torch.rand(shape).to(dtype)), 5)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


class Drifting(nn.Module):
    """Keeps how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return squared(outputs.squeeze(-1), targets)


@pytest.mark.parametrize("loss_fn", [squared, nn.MSELoss(), nn.HuberLoss(), nn.L1Loss()])
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_outputs_against_the_targets_of_all_samples_are_refused(
    loss_fn: Callable[..., Tensor], evaluates: bool
) -> None:
    model, trainer = nn.Linear(4, 1), Trainer(max_epochs=1, callbacks=[])
    before = model.weight.clone()
    loaders: Any = (loader(SAMPLES, 1), loader(SAMPLES)) if evaluates else loader(SAMPLES)
    with pytest.raises(ConfigError, match=r"shape \(5, 1\) and targets of shape \(5,\)"):
        trainer.fit(model, loaders, optimizer=sgd, loss_fn=loss_fn)
    assert torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="targets of all samples"):
        trainer.evaluate(model, loader(SAMPLES), loss_fn=loss_fn)
    flat = nn.Sequential(model, nn.Flatten(0))
    with pytest.raises(ConfigError, match=r"shape \(5,\) and targets of shape \(5, 1\)"):
        trainer.fit(flat, loader(SAMPLES, 1), optimizer=sgd, loss_fn=loss_fn)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda outputs, targets: squared(outputs.squeeze(-1), targets),
        lambda outputs, targets: squared(outputs.mean(-1), targets),
        lambda outputs, targets: squared(outputs[:, 0], targets),
        lambda outputs, targets: squared(outputs, targets[:, None]),
        lambda outputs, targets: squared(torch.rand(()) * outputs.flatten(), targets),
    ],
)
def test_a_loss_that_pairs_them_itself_is_trained(loss_fn: Callable[..., Tensor]) -> None:
    trainer = Trainer(max_epochs=1, callbacks=[])
    loaders = (loader(SAMPLES), loader(SAMPLES))
    assert trainer.fit(nn.Linear(4, 1), loaders, optimizer=sgd, loss_fn=loss_fn).step == 2


def test_the_look_at_a_loss_leaves_nothing_in_it() -> None:
    loss_fn = Drifting()
    Trainer(max_epochs=1, callbacks=[]).fit(
        nn.Linear(4, 1), loader(SAMPLES), optimizer=sgd, loss_fn=loss_fn
    )
    assert loss_fn.calls == 2


class Pair(nn.Linear):
    def forward(self, inputs: Tensor) -> Any:
        outputs = super().forward(inputs)
        return outputs, {"hidden": outputs}


@pytest.mark.parametrize(
    ("model", "targets", "loss_fn", "words"),
    [
        (
            nn.Linear(4, 3),
            loader(SAMPLES),
            nn.CrossEntropyLoss(),
            "got float32 [5, 3] as outputs, and float32 [5] as targets.",
        ),
        (
            nn.Linear(4, 3),
            loader(SAMPLES, 1, dtype=torch.int64),
            nn.CrossEntropyLoss(),
            "got float32 [5, 3] as outputs, and int64 [5, 1] as targets.",
        ),
        (
            Pair(4, 3),
            loader(SAMPLES, dtype=torch.int64),
            nn.CrossEntropyLoss(),
            "got a tuple of 2 (float32 [5, 3], a dict with the keys ['hidden']) as outputs, and "
            "int64 [5] as targets. It gets what the model returns. Take out what it is to compare: "
            "`loss_fn=lambda outputs, targets: loss(outputs[0], targets)`.",
        ),
    ],
)
def test_an_error_of_a_loss_says_what_it_was_given(
    model: nn.Module, targets: Any, loss_fn: Any, words: str
) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        Trainer(max_epochs=1, callbacks=[]).fit(model, targets, optimizer=sgd, loss_fn=loss_fn)
    assert f"`loss_fn` {words}" in caught.value.__notes__
