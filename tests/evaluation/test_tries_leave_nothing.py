"""What is tried before the first step leaves nothing behind, in names around functions too."""

from collections import OrderedDict, deque
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.toys import FEATURES, toy_dataset
from trainkit import Callback, Run, Trainer
from trainkit.callbacks import Evaluation


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, list[float]()

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


batches, losses, latest, meter = 0, list[float](), deque[float](maxlen=2), Meter()
by_name: dict[str, int] = {}


class Registry(OrderedDict[str, Any]):
    """Makes what it holds the classes of, as that of transformers' activations does."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


registry = Registry(relu=nn.ReLU)
smooth: float | None = None
mean = torch.zeros(2)


def smoothed(predictions: Tensor, references: Tensor) -> float:
    global smooth
    value = (predictions == references).float().mean().item()
    smooth = value if smooth is None else 0.5 * smooth + 0.5 * value
    return smooth


class Records(Trainer):
    """Collects what each batch of an evaluation gives in names of this file."""

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        global batches
        outputs = model(batch[0])
        loss = nn.functional.cross_entropy(outputs, batch[1])
        batches += 1
        for each in (losses, latest):
            each.append(loss.item())
        meter.update(loss.item())
        by_name["batches"] = by_name.get("batches", 0) + 1
        mean.add_(outputs.mean(0))
        registry["relu"](outputs)
        return {"predictions": outputs.argmax(1), "references": batch[1], "loss": loss}


class Reads(Callback):
    def __init__(self) -> None:
        self.counted: list[int] = []

    def on_evaluation_end(self, run: Run, *_: Any) -> None:
        found = len(losses), len(latest), len(meter.values), by_name["batches"], batches
        self.counted.extend(found)


def test_a_rehearsal_changes_no_name_around_the_step_or_a_metric() -> None:
    data = toy_dataset()
    reads, loaders = Reads(), (DataLoader(data, 8), DataLoader(data, 4))
    trainer = Records(max_epochs=1, callbacks=[Evaluation([smoothed]), reads])
    model = nn.Linear(FEATURES, 2)
    sgd, loss_fn = partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss()
    trainer.fit(model, loaders, optimizer=sgd, loss_fn=loss_fn)
    assert reads.counted == [8, 2, 8, 8, 8]
    outputs = model(data.tensors[0])
    assert smooth == (outputs.argmax(1) == data.tensors[1]).float().mean().item()
    torch.testing.assert_close(mean / 8, outputs.mean(0).detach())
    assert [*registry.values()] == [nn.ReLU]


def _by_closure() -> tuple[Any, Any]:
    calls = 0

    def annealed(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return (outputs.flatten() - targets).square().mean() * calls

    return annealed, lambda: calls


class Annealed:
    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return (outputs.flatten() - targets).square().mean() * self.calls


def _by_object() -> tuple[Any, Any]:
    loss = Annealed()
    return loss, lambda: loss.calls


@pytest.mark.parametrize("make", [_by_closure, _by_object])
def test_a_loss_that_is_tried_with_equal_shapes_counts_one_call(make: Any) -> None:
    loss, calls = make()
    data = torch.utils.data.TensorDataset(torch.randn(8, FEATURES), torch.randn(8))
    Trainer(max_epochs=1, callbacks=[]).fit(
        nn.Linear(FEATURES, 1),
        DataLoader(data, 4),
        optimizer=partial(torch.optim.SGD, lr=0.0),
        loss_fn=loss,
    )
    assert calls() == 2
