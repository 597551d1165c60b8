"""A user's project: which class each pixel of an image is of."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from trainkit import Trainer
from trainkit.callbacks import Evaluation

torchmetrics, segmentation = late("torchmetrics"), late("torchmetrics.segmentation")

CLASSES = SIDE = 4  # as many classes as rows and columns: an argmax over the wrong one fits


def images(count: int, seed: int) -> TensorDataset:
    """Return noisy images whose brightness says the class of each pixel."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count, SIDE, SIDE), generator=generator)
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return TensorDataset(classes[:, None] + 0.4 * noise, classes)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 1), nn.ReLU(), nn.Conv2d(16, CLASSES, 1))


def pixel_accuracy(predictions: Tensor, references: Tensor) -> float:
    return float((predictions == references).double().mean())


def train(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    model, held_out = make_model(), DataLoader(images(13, seed=1), batch_size=2)
    metrics = [
        pixel_accuracy,
        torchmetrics.classification.MulticlassJaccardIndex(CLASSES),
        segmentation.MeanIoU(num_classes=CLASSES, input_format="index"),
    ]
    trainer = Trainer(max_epochs=4, callbacks=[Evaluation(metrics)], split_batches=True)
    result = trainer.fit(
        model,
        (DataLoader(images(48, seed=0), batch_size=8, shuffle=True), held_out),
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        loss_fn=nn.CrossEntropyLoss(),
    )
    inputs, targets = held_out.dataset.tensors  # type: ignore[attr-defined]
    with torch.no_grad():
        outputs = model.cpu()(inputs)
    assert torch.equal(trainer.predict(model, held_out, outputs="classes"), outputs.argmax(1))
    expected = {
        "eval/pixel_accuracy": pixel_accuracy(outputs.argmax(1), targets),
        "eval/MulticlassJaccardIndex": float(metrics[1](outputs, targets)),
        "eval/MeanIoU": float(metrics[2](outputs.argmax(1), targets)),
    }
    return result.metrics, expected


@pytest.mark.e2e
def test_figures_are_those_by_hand_on_one_and_two_processes() -> None:
    found: list[Any] = [run_ranks(size, train) for size in (1, 2)]
    (alone, _), *_ = found[0]
    assert alone["eval/pixel_accuracy"] > 0.6
    for figures, expected in [*found[0], *found[1]]:
        assert figures == pytest.approx(alone, rel=1e-4)
        assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)
