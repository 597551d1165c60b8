"""A user's project: which of several labels a sample has."""

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
from trainkit.metrics import load

sklearn, torchmetrics = late("sklearn.metrics"), late("torchmetrics")

LABELS = 3


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 5, generator=generator)
    noise = 0.5 * torch.randn(count, LABELS, generator=generator)
    return features, (features[:, :LABELS] - features[:, 2:] + noise > 0).float()


def train(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    torch.manual_seed(0)
    model, macro = nn.Linear(5, LABELS), partial(sklearn.f1_score, average="macro")
    tm = torchmetrics.classification
    collection = torchmetrics.MetricCollection(
        {"auroc": tm.MultilabelAUROC(LABELS), "exact": tm.MultilabelExactMatch(LABELS)}
    )
    named = [load("f1", average="macro", multilabel=True), load("accuracy", multilabel="all")]
    metrics: list[Any] = [
        macro,
        sklearn.hamming_loss,
        sklearn.label_ranking_loss,
        collection,
        *named,
    ]
    held_out = DataLoader(TensorDataset(*samples(47, seed=1)), batch_size=2)
    trainer = Trainer(max_epochs=3, callbacks=[Evaluation(metrics)], split_batches=True)
    result = trainer.fit(
        model,
        (DataLoader(TensorDataset(*samples(96, seed=0)), batch_size=8, shuffle=True), held_out),
        optimizer=partial(torch.optim.Adam, lr=3e-2),
        loss_fn=nn.BCEWithLogitsLoss(),
    )
    inputs, targets = samples(47, seed=1)
    with torch.no_grad():
        outputs = model.cpu()(inputs)
    unlabelled = DataLoader(TensorDataset(inputs), batch_size=2)
    for loader in (held_out, unlabelled):
        assert torch.allclose(trainer.predict(model, loader), outputs)
        predicted = trainer.predict(model, loader, outputs="probabilities")
        assert torch.allclose(predicted, outputs.sigmoid())
    expected = {
        "eval/f1": macro(targets, outputs > 0),
        "eval/accuracy": sklearn.accuracy_score(targets, outputs > 0),
        "eval/f1_score": macro(targets, outputs > 0),
        "eval/hamming_loss": sklearn.hamming_loss(targets, outputs > 0),
        "eval/label_ranking_loss": sklearn.label_ranking_loss(targets, outputs),
        **{f"eval/{k}": float(v) for k, v in collection(outputs, targets.long()).items()},
    }
    return result.metrics, expected


@pytest.mark.e2e
def test_figures_are_those_by_hand_on_one_and_two_processes() -> None:
    found = [run_ranks(size, train) for size in (1, 2)]
    (alone, _), *_ = found[0]
    for figures, expected in [*found[0], *found[1]]:
        assert figures == pytest.approx(alone, rel=1e-4)
        assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)
