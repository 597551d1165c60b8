"""A user's project: rare events, judged by how well their scores are ordered."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from trainkit import Trainer
from trainkit.callbacks import EarlyStopping, Evaluation
from trainkit.metrics import FunctionMetric, scores

sklearn, torchmetrics = late("sklearn.metrics"), late("torchmetrics")


def events(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return features, and whether the event happened: about one in ten."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 6, generator=generator)
    logits = 1.5 * features[:, 0] - features[:, 1] - 3
    return features, (torch.rand(count, generator=generator) < logits.sigmoid()).long()


class OneScore(nn.Module):
    """Gives one logit for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features).squeeze(1)  # type: ignore[no-any-return]


def auc_of_two(outputs: Tensor, targets: Tensor) -> float:
    return float(sklearn.roc_auc_score(targets, outputs[:, 1] - outputs[:, 0]))


def fit(model: nn.Module, metrics: list[Any], loss_fn: nn.Module) -> dict[str, float]:
    dtype = torch.float32 if isinstance(loss_fn, nn.BCEWithLogitsLoss) else torch.int64
    train, held_out = (TensorDataset(x, y.to(dtype)) for x, y in (events(200, 0), events(101, 1)))
    watched = (
        FunctionMetric(sklearn.roc_auc_score, name="auc") if dtype.is_floating_point else "accuracy"
    )
    figure = "eval/auc" if dtype.is_floating_point else "eval/accuracy"
    callbacks = [
        Evaluation([*metrics, watched]),
        EarlyStopping(figure, patience=5, mode="max"),
    ]
    loaders = (
        DataLoader(train, batch_size=20, shuffle=True),
        DataLoader(held_out, batch_size=2),
    )
    optimizer = partial(torch.optim.Adam, lr=5e-2)
    trainer = Trainer(max_epochs=3, callbacks=callbacks, split_batches=True)
    return trainer.fit(model, loaders, optimizer=optimizer, loss_fn=loss_fn).metrics


def train(rank: int) -> list[tuple[dict[str, float], dict[str, float]]]:
    torch.manual_seed(0)
    one, two = OneScore(), nn.Linear(6, 2)
    figures_one = fit(
        one,
        [
            torchmetrics.AUROC(task="binary"),
            sklearn.average_precision_score,
            sklearn.f1_score,
            sklearn.log_loss,
        ],
        nn.BCEWithLogitsLoss(),
    )
    figures_two = fit(
        two,
        [scores(auc_of_two), torchmetrics.AUROC(task="multiclass", num_classes=2)],
        nn.CrossEntropyLoss(),
    )
    inputs, targets = events(101, 1)
    with torch.no_grad():
        score, both = one.cpu()(inputs), two.cpu()(inputs)
    auc = sklearn.roc_auc_score(targets, score)
    return [
        (
            figures_one,
            {
                "eval/auc": auc,
                "eval/BinaryAUROC": auc,
                "eval/average_precision_score": sklearn.average_precision_score(targets, score),
                "eval/f1_score": sklearn.f1_score(targets, score > 0),
                "eval/log_loss": sklearn.log_loss(targets, score.sigmoid()),
            },
        ),
        (
            figures_two,
            {
                "eval/auc_of_two": auc_of_two(both, targets),
                "eval/MulticlassAUROC": auc_of_two(both, targets),
            },
        ),
    ]


@pytest.mark.e2e
def test_figures_are_those_by_hand_on_one_and_two_processes() -> None:
    found = [run_ranks(size, train) for size in (1, 2)]
    for results in [*found[0], *found[1]]:
        for (figures, expected), (alone, _) in zip(results, found[0][0], strict=True):
            assert figures == pytest.approx(alone, rel=1e-4)
            assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-5)
