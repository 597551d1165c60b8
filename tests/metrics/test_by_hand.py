"""Metrics of torchmetrics and sklearn give what they give by hand on all outputs and targets."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from trainkit import ConfigError, DataError, Trainer
from trainkit.metrics import FunctionMetric, TorchMetric, as_metric, scores
from trainkit.metrics.metric import flatten

torchmetrics, sklearn = late("torchmetrics"), late("sklearn.metrics")
segmentation = late("torchmetrics.segmentation")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, by hand too

SAMPLES = 83  # on two processes the last batch is filled up
BATCH_SIZE = 2  # so that metrics get several chunks
CLASSES = 4


def last_axis_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.transpose(1, 2), targets)


@dataclass(frozen=True)
class Task:
    """Outputs of a model, what is true, the loss, and what they mean by hand."""

    outputs: Tensor
    targets: Tensor
    loss_fn: Any
    classes: Tensor
    probabilities: Tensor


@cache
def task(name: str) -> Task:
    torch.manual_seed(0)
    if name in ("binary", "multilabel"):
        outputs = 2 * torch.randn(SAMPLES, *[3] * (name == "multilabel"))
        outputs[-1] = outputs[-1].abs() / 8  # the last chunk alone looks like probabilities
        targets = (torch.rand(outputs.shape) < outputs.sigmoid()).float()
        loss_fn: Any = nn.BCEWithLogitsLoss()
        return Task(outputs, targets, loss_fn, (outputs > 0).long(), outputs.sigmoid())
    if name == "regression":
        targets = torch.rand(SAMPLES) + 0.5
        outputs = targets + 0.3 * torch.randn(SAMPLES)
        return Task(outputs, targets, nn.MSELoss(), outputs, outputs)
    if name == "language":
        outputs = torch.randn(SAMPLES, 5, CLASSES)
        targets = torch.randint(CLASSES, (SAMPLES, 5))
        return Task(outputs, targets, last_axis_loss, outputs.argmax(-1), outputs.softmax(-1))
    shape = (4, 4) if name == "segmentation" else ()  # as many rows and columns as classes
    targets = torch.randint(CLASSES, (SAMPLES, *shape))
    hot = functional.one_hot(targets, CLASSES).movedim(-1, 1)
    outputs = 2 * hot + 1.5 * torch.randn(hot.shape)
    return Task(outputs, targets, nn.CrossEntropyLoss(), outputs.argmax(1), outputs.softmax(1))


Made = tuple[Any, Callable[[Task], Any]]
"""A metric for an evaluation, and what it gives by hand."""


def torch_metric(name: str, uses: str = "outputs", **options: Any) -> Made:
    place, _, last = f"torchmetrics.{name}".rpartition(".")
    cls: Callable[..., Any] = getattr(import_module(place), last)

    def by_hand(task: Task) -> Any:
        metric = cls(**options)
        whole = type(metric).__module__.startswith("torchmetrics.classification")
        metric.update(getattr(task, uses), task.targets.long() if whole else task.targets)
        return metric.compute()

    return cls(**options), by_hand


def sklearn_metric(name: str, uses: str = "classes", **options: Any) -> Made:
    function = partial(getattr(sklearn, name), **options)
    return function, lambda task: function(task.targets, getattr(task, uses))


def our_metric(name: str, theirs: str, uses: str = "classes") -> Made:
    return name, lambda task: getattr(sklearn, theirs)(task.targets, getattr(task, uses))


def token_accuracy(predictions: Tensor, references: Tensor) -> float:
    return float((predictions == references).double().mean())


def surprise(predictions: Tensor, references: Tensor) -> float:
    return float(functional.cross_entropy(predictions, references))


def function_metric(function: Any, by_hand: Callable[[Task], Any]) -> Made:
    return function, by_hand


MULTICLASS: Any = {"num_classes": CLASSES}
MULTILABEL: Any = {"num_labels": 3}
INDEX: Any = {"num_classes": CLASSES, "input_format": "index"}

CASES: dict[str, Callable[[], Made]] = {
    # A score for one class.
    "binary AUROC": partial(torch_metric, "AUROC", task="binary"),
    "binary binned AUROC": partial(torch_metric, "classification.BinaryAUROC", thresholds=20),
    "binary average precision": partial(torch_metric, "classification.BinaryAveragePrecision"),
    "binary accuracy": partial(torch_metric, "classification.BinaryAccuracy"),
    "binary F1": partial(torch_metric, "classification.BinaryF1Score"),
    "binary specificity": partial(torch_metric, "classification.BinarySpecificity"),
    "binary calibration": partial(torch_metric, "classification.BinaryCalibrationError", n_bins=5),
    "binary Matthews": partial(torch_metric, "classification.BinaryMatthewsCorrCoef"),
    "binary hinge": partial(torch_metric, "classification.BinaryHingeLoss"),
    "binary roc_auc_score": partial(sklearn_metric, "roc_auc_score", "outputs"),
    "binary average_precision_score": partial(sklearn_metric, "average_precision_score", "outputs"),
    "binary f1_score": partial(sklearn_metric, "f1_score"),
    "binary brier_score_loss": partial(sklearn_metric, "brier_score_loss", "probabilities"),
    "binary log_loss": partial(sklearn_metric, "log_loss", "probabilities"),
    "binary ours": partial(our_metric, "accuracy", "accuracy_score"),
    "binary our recall": partial(our_metric, "recall", "recall_score"),
    # Scores of classes.
    "multiclass accuracy": partial(torch_metric, "classification.MulticlassAccuracy", **MULTICLASS),
    "multiclass top 2": partial(
        torch_metric, "classification.MulticlassAccuracy", top_k=2, average="micro", **MULTICLASS
    ),
    "multiclass F1": partial(torch_metric, "classification.MulticlassF1Score", **MULTICLASS),
    "multiclass AUROC": partial(torch_metric, "classification.MulticlassAUROC", **MULTICLASS),
    "multiclass average precision": partial(
        torch_metric, "classification.MulticlassAveragePrecision", **MULTICLASS
    ),
    "multiclass calibration": partial(
        torch_metric, "classification.MulticlassCalibrationError", n_bins=5, **MULTICLASS
    ),
    "multiclass kappa": partial(torch_metric, "classification.MulticlassCohenKappa", **MULTICLASS),
    "multiclass confusions": partial(
        torch_metric, "classification.MulticlassConfusionMatrix", **MULTICLASS
    ),
    "multiclass hinge": partial(torch_metric, "classification.MulticlassHingeLoss", **MULTICLASS),
    "multiclass clusters": partial(torch_metric, "clustering.MutualInfoScore", "classes"),
    "multiclass rand": partial(torch_metric, "clustering.AdjustedRandScore", "classes"),
    "multiclass balanced_accuracy_score": partial(sklearn_metric, "balanced_accuracy_score"),
    "multiclass f1_score": partial(sklearn_metric, "f1_score", average="macro"),
    "multiclass top_k_accuracy_score": partial(sklearn_metric, "top_k_accuracy_score", "outputs"),
    "multiclass roc_auc_score": partial(
        sklearn_metric, "roc_auc_score", "probabilities", multi_class="ovr"
    ),
    "multiclass log_loss": partial(sklearn_metric, "log_loss", "probabilities"),
    "multiclass ours": partial(our_metric, "accuracy", "accuracy_score"),
    "multiclass function of scores": lambda: (
        scores(surprise),
        lambda task: functional.cross_entropy(task.outputs, task.targets),
    ),
    "multiclass function of probabilities": lambda: (
        FunctionMetric(lambda p, r: p[:, 0].mean(), uses="probabilities"),
        lambda task: task.probabilities[:, 0].mean(),
    ),
    # A score for each of several labels.
    "multilabel AUROC": partial(torch_metric, "classification.MultilabelAUROC", **MULTILABEL),
    "multilabel average precision": partial(
        torch_metric, "classification.MultilabelAveragePrecision", **MULTILABEL
    ),
    "multilabel F1": partial(torch_metric, "classification.MultilabelF1Score", **MULTILABEL),
    "multilabel exact": partial(torch_metric, "classification.MultilabelExactMatch", **MULTILABEL),
    "multilabel ranking": partial(
        torch_metric, "classification.MultilabelRankingLoss", **MULTILABEL
    ),
    "multilabel f1_score": partial(sklearn_metric, "f1_score", average="macro"),
    "multilabel hamming_loss": partial(sklearn_metric, "hamming_loss"),
    "multilabel coverage_error": partial(sklearn_metric, "coverage_error", "outputs"),
    # Values.
    "regression error": partial(torch_metric, "regression.MeanSquaredError"),
    "regression R2": partial(torch_metric, "regression.R2Score"),
    "regression Pearson": partial(torch_metric, "regression.PearsonCorrCoef"),
    "regression Spearman": partial(torch_metric, "regression.SpearmanCorrCoef"),
    "regression concordance": partial(torch_metric, "regression.ConcordanceCorrCoef"),
    "regression r2_score": partial(sklearn_metric, "r2_score"),
    "regression median_absolute_error": partial(sklearn_metric, "median_absolute_error"),
    "regression ours": partial(our_metric, "mae", "mean_absolute_error"),
    # Scores of classes at each place.
    "segmentation Jaccard": partial(
        torch_metric, "classification.MulticlassJaccardIndex", **MULTICLASS
    ),
    "segmentation F1": partial(torch_metric, "classification.MulticlassF1Score", **MULTICLASS),
    "segmentation IoU": partial(torch_metric, "segmentation.MeanIoU", "classes", **INDEX),
    "segmentation IoU of scores": partial(
        torch_metric, "segmentation.MeanIoU", num_classes=CLASSES, input_format="mixed"
    ),
    "segmentation Dice": partial(
        torch_metric, "segmentation.GeneralizedDiceScore", "classes", **INDEX
    ),
    "segmentation function": lambda: (
        token_accuracy,
        lambda task: (task.classes == task.targets).double().mean(),
    ),
    # Scores of the next token, last.
    "language perplexity": partial(torch_metric, "text.Perplexity"),
    "language function": lambda: (
        token_accuracy,
        lambda task: (task.classes == task.targets).double().mean(),
    ),
}


def named(case: str, thing: Any) -> Any:
    """Return a metric whose figures are those of one case."""
    if isinstance(thing, str):
        return thing
    if isinstance(thing, nn.Module):
        return TorchMetric(thing, name=case)
    metric = as_metric(thing)
    metric.name = case
    return metric


def evaluate_all(rank: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind in dict.fromkeys(case.split()[0] for case in CASES):
        data = task(kind)
        loader = DataLoader(TensorDataset(data.outputs, data.targets), batch_size=BATCH_SIZE)
        found = Trainer(max_steps=1, callbacks=[]).evaluate(
            nn.Identity(),
            {kind: loader},
            metrics=[
                named(case, make()[0])
                for case, make in CASES.items()
                if case.startswith(f"{kind} ")
            ],
            loss_fn=data.loss_fn,
        )
        figures |= found
    return figures


@pytest.mark.parametrize("size", [1, 2])
def test_figures_are_those_by_hand(size: int) -> None:
    """All in one test: each other worker of pytest would start the processes again."""
    ranks = run_ranks(size, evaluate_all, timeout=240)
    for case, make in CASES.items():
        kind = case.split()[0]
        made, by_hand = make()
        expected = flatten(made if isinstance(made, str) else case, by_hand(task(kind)))
        assert expected
        for name, value in expected.items():
            assert not math.isnan(value), (case, name)
            for found in ranks:
                figure = found[f"eval/{kind}/{name}"]
                assert figure == pytest.approx(value, rel=1e-4, abs=1e-6), (case, name)


OTHER_INPUTS: tuple[Callable[[], Any], ...] = (
    lambda: torchmetrics.retrieval.RetrievalMAP(),
    lambda: torchmetrics.classification.BinaryFairness(num_groups=2),
    lambda: torchmetrics.SumMetric(),
)


@pytest.mark.parametrize("make", OTHER_INPUTS)
def test_metrics_that_want_other_inputs_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"takes `update\(.*`evaluation_step`"):
        as_metric(make())


@pytest.mark.parametrize("name", ["roc_auc_score", "average_precision_score"])
def test_scores_of_both_classes_where_sklearn_wants_one_are_refused(name: str) -> None:
    loader = DataLoader(TensorDataset(torch.rand(6, 2), torch.ones(6).long()), batch_size=2)
    trainer = Trainer(max_steps=1, callbacks=[])
    function = partial(getattr(sklearn, name), sample_weight=None)
    with pytest.raises(DataError, match=rf"(?s){name}\(r, p\[:, 1\]\).*a column for each"):
        trainer.evaluate(nn.Identity(), loader, metrics=[function], loss_fn=nn.CrossEntropyLoss())


def test_collections_of_several_kinds_of_input_are_refused() -> None:
    tm = torchmetrics
    mixed = [tm.classification.MulticlassAUROC(CLASSES), segmentation.MeanIoU(**INDEX)]
    with pytest.raises(ConfigError, match="one kind of input"):
        as_metric(tm.MetricCollection(mixed))


def test_inputs_that_a_metric_cannot_take_are_named() -> None:
    data = task("multiclass")
    loader = DataLoader(TensorDataset(data.outputs, data.targets), batch_size=BATCH_SIZE)
    binary = torchmetrics.classification.BinaryAccuracy
    for metric in (torchmetrics.AUROC(task="binary"), binary()):
        with pytest.raises(DataError, match=r"outputs of shape \[32, 4\].*`evaluation_step`"):
            Trainer(max_steps=1, callbacks=[]).evaluate(nn.Identity(), loader, metrics=[metric])
