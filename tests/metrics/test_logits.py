"""Metrics of torchmetrics get logits as what they are, wherever these lie."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import late, needs_transformers
from tests.helpers.ranks import run_ranks
from trainkit import DataError, Trainer

torchmetrics, tm = late("torchmetrics"), late("torchmetrics.classification")

SAMPLES = 21
BOTH: Any = {"num_classes": 3}


def logits(*shape: int) -> Tensor:
    """Return logits that all lie in [0, 1]."""
    return torch.rand(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, (SAMPLES, *shape), generator=torch.Generator().manual_seed(1))


def evaluated(
    outputs: Tensor, targets: Tensor, loss_fn: Any, *metrics: Any, trainer: type[Trainer] = Trainer
) -> dict[str, float]:
    loader = DataLoader(TensorDataset(outputs, targets), batch_size=4)
    return trainer(max_steps=1, callbacks=[]).evaluate(
        nn.Identity(), loader, metrics=metrics, loss_fn=loss_fn
    )


def made(name: str, **options: Any) -> Any:
    return getattr(tm, name)(**options)


BINARY = (
    partial(made, "BinaryAccuracy"),
    partial(made, "BinaryCalibrationError", n_bins=5),
    partial(made, "BinaryAUROC"),
)
SEVERAL = (
    partial(made, "MulticlassCalibrationError", n_bins=5, **BOTH),
    partial(made, "MulticlassHingeLoss", **BOTH),
    partial(made, "MulticlassAUROC", **BOTH),
)
LABELS = (
    partial(made, "MultilabelAccuracy", num_labels=3),
    partial(made, "MultilabelAUROC", num_labels=3),
)
CASES: list[Any] = [
    (logits(), whole(2).float(), nn.BCEWithLogitsLoss(), torch.sigmoid, BINARY),
    (
        logits(),
        whole(2).float(),
        partial(functional.binary_cross_entropy_with_logits, pos_weight=torch.tensor(2.0)),
        torch.sigmoid,
        BINARY,
    ),
    (logits(3), whole(2, 3).float(), nn.BCEWithLogitsLoss(), torch.sigmoid, LABELS),
    (logits(3), whole(3), nn.CrossEntropyLoss(), partial(torch.softmax, dim=1), SEVERAL),
    # Those that are probabilities stay what they are.
    (logits(), whole(2).float(), nn.BCELoss(), torch.clone, BINARY),
    # So do scores of classes, of which a metric of labels makes probabilities one by one.
    (logits(3), functional.one_hot(whole(3)).float(), nn.CrossEntropyLoss(), torch.clone, LABELS),
]


def evaluate_all(rank: int) -> list[dict[str, float]]:
    return [
        evaluated(outputs, targets, loss_fn, *(make() for make in makes))
        for outputs, targets, loss_fn, _, makes in CASES
    ]


@pytest.mark.parametrize("size", [1, 2])
def test_logits_in_0_to_1_are_no_probabilities(size: int) -> None:
    for found in run_ranks(size, evaluate_all):
        for figures, (outputs, targets, _, activation, makes) in zip(found, CASES, strict=True):
            for make in makes:
                metric = make()
                metric.update(activation(outputs), targets.long())
                name = f"eval/{type(metric).__name__}"
                assert figures[name] == pytest.approx(float(metric.compute()), abs=1e-6), name


def test_a_metric_does_not_remember_what_the_scores_of_another_evaluation_were() -> None:
    metric = tm.BinaryAccuracy()
    targets = whole(2).float()
    evaluated(logits(), targets, nn.BCEWithLogitsLoss(), metric)
    figures = evaluated(logits(), targets, nn.BCELoss(), metric)
    metric.reset()
    metric.update(logits(), targets.long())
    assert figures["eval/BinaryAccuracy"] == pytest.approx(float(metric.compute()))


def test_what_a_step_of_ones_own_returns_is_left_alone() -> None:
    class Own(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
            return {"scores": model(batch[0]), "references": batch[1]}

    figures = evaluated(
        logits(), whole(2), nn.BCEWithLogitsLoss(), tm.BinaryAccuracy(), trainer=Own
    )
    by_hand = ((logits() > 0.5) == whole(2)).double().mean().item()
    assert figures["eval/BinaryAccuracy"] == pytest.approx(by_hand)


def words(rank: int) -> list[dict[str, float]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=16,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(config).eval()
    generator = torch.Generator().manual_seed(2)
    found = []
    for length in (5, 3):  # of the classes, the dimension could be told by nothing but the model
        ids = torch.randint(16, (7, length), generator=generator)
        labels = torch.randint(3, (7, length), generator=generator)
        labels[:, -1] = -100
        rows: Any = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
        loader: Any = DataLoader(rows, batch_size=2)
        trainer = Trainer(max_steps=1, callbacks=[])
        metrics = torchmetrics.MetricCollection(
            {
                "micro": torchmetrics.Accuracy(
                    "multiclass", num_classes=3, average="micro", ignore_index=-100
                ),
                "auroc": tm.MulticlassAUROC(num_classes=3, ignore_index=-100),
            }
        )
        figures = trainer.evaluate(model, loader, metrics=[metrics])
        with torch.no_grad():
            scores = model(ids).logits
        counted = labels != -100
        right = (scores.argmax(-1) == labels)[counted].double().mean().item()
        auroc = tm.MulticlassAUROC(num_classes=3)
        auroc.update(scores[counted].softmax(-1), labels[counted])
        found += [figures | {"right": right, "area": float(auroc.compute())}]
        with pytest.raises(DataError, match="`ignore_index=-100`"):
            trainer.evaluate(
                model, loader, metrics=[torchmetrics.Accuracy("multiclass", num_classes=3)]
            )
    return found


@needs_transformers
@pytest.mark.parametrize("size", [1, 2])
def test_words_that_a_token_classifier_ignores_are_ignored(size: int) -> None:
    for found in run_ranks(size, words, timeout=240):
        for figures in found:
            assert figures["eval/micro"] == pytest.approx(figures["right"])
            assert figures["eval/auroc"] == pytest.approx(figures["area"], abs=1e-5)
