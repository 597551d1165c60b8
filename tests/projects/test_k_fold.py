"""k-fold cross-validation as a new user writes it: a trainer for each fold, in a loop."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.helpers.ranks import run_ranks
from trainkit import Callback, Run, Trainer
from trainkit.types import Scalars

FOLDS = 4
SAMPLES = 53  # folds of 14, 13, 13, 13


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    noise = 0.3 * torch.randn(SAMPLES, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] - inputs[:, 1] + noise)[:, None])


class Folds(Trainer):
    """Logs the absolute error, and how much of each fold it saw."""

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        inputs, targets = batch
        self.run.log({"mae": (model(inputs) - targets).abs().mean()})
        self.run.log({"samples": len(inputs)}, reduce="sum")
        return super().evaluation_step(model, batch)


class OtherFold(Callback):
    """Looks, after each evaluation, at the data that were trained on too."""

    def __init__(self, trained_on: Any) -> None:
        self.trained_on = trained_on
        self.trainer: Trainer | None = None
        self.gaps: list[float] = []

    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        assert self.trainer is not None
        assert self.trainer.run is run
        seen = self.trainer.evaluate(run.module, DataLoader(self.trained_on, 8))
        assert seen["eval/samples"] == len(self.trained_on)
        self.gaps.append(metrics["eval/mae"] - seen["eval/mae"])


def cross_validate(rank: int) -> dict[str, Any]:
    data = make_data()
    order = np.random.default_rng(0).permutation(SAMPLES)
    figures, out_of_fold, gaps = [], torch.full((SAMPLES, 1), torch.nan), []
    for fold, held_out in enumerate(np.array_split(order, FOLDS)):
        trained_on = np.setdiff1d(order, held_out)
        train, test = Subset(data, trained_on.tolist()), Subset(data, held_out.tolist())
        look = OtherFold(train)
        trainer = Folds(max_epochs=3, seed=fold, split_batches=True, callbacks=[look])
        look.trainer = trainer
        torch.manual_seed(fold)
        model = nn.Linear(5, 1)
        result = trainer.fit(
            model,
            (DataLoader(train, 8, shuffle=True), DataLoader(test, 4)),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            loss_fn=nn.MSELoss(),
        )
        figures.append(trainer.evaluate(model, DataLoader(test, 4), metrics=["mse"]))
        assert figures[-1]["eval/loss"] == result.metrics["eval/loss"]
        assert figures[-1]["eval/mae"] == result.metrics["eval/mae"]
        out_of_fold[held_out] = trainer.predict(model, DataLoader(test, 4))
        gaps += look.gaps
    return {"figures": figures, "out_of_fold": out_of_fold, "gaps": gaps}


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.e2e
def test_each_sample_is_predicted_once_by_a_model_that_has_not_seen_it() -> None:
    (alone,) = run_ranks(1, cross_validate)
    targets = make_data().tensors[1]
    for found in (alone, *run_ranks(2, cross_validate)):
        assert close(found["out_of_fold"], alone["out_of_fold"])
        assert found["gaps"] == pytest.approx(alone["gaps"], rel=1e-4, abs=1e-6)
        assert len(found["gaps"]) == 3 * FOLDS
        seen = [figures["eval/samples"] for figures in found["figures"]]
        assert seen == [14, 13, 13, 13]
        errors = (found["out_of_fold"] - targets).double()
        for name, by_hand in (
            ("eval/mae", errors.abs().mean()),
            ("eval/mse", errors.square().mean()),
            ("eval/loss", errors.square().mean()),
        ):
            total = sum(f[name] * n for f, n in zip(found["figures"], seen, strict=True))
            assert total / SAMPLES == pytest.approx(by_hand.item(), rel=1e-5)
