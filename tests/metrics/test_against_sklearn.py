"""The metrics of trainkit give what scikit-learn gives."""

import math
import warnings
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.helpers.needs import late
from trainkit.errors import ConfigError, DataError
from trainkit.metrics import F1, MAE, MSE, Accuracy, Precision, Recall

sklearn_metrics = late("sklearn.metrics")

SCORES = {
    "f1": (F1, "f1_score"),
    "precision": (Precision, "precision_score"),
    "recall": (Recall, "recall_score"),
}


def close(expected: Any) -> Any:
    """Return what compares equal to `expected`, but for rounding: sums are in another order."""
    return pytest.approx(expected, rel=1e-12, abs=1e-12, nan_ok=True)


def labels(classes: int, seed: int, samples: int = 40) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(classes, (2, samples), generator=generator)
    return drawn[0].tolist(), drawn[1].tolist()


def compare(
    name: str, predictions: Any, references: Any, weights: Any = None, **options: Any
) -> None:
    ours, theirs = SCORES[name]
    figures = ours().compute(
        predictions=predictions, references=references, sample_weight=weights, **options
    )
    expected = getattr(sklearn_metrics, theirs)(
        references, predictions, sample_weight=weights, **options
    )
    assert numpy.ravel(figures[name]) == close(numpy.ravel(expected))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("average", ["macro", "micro", "weighted", None])
@pytest.mark.parametrize("options", [{}, {"labels": [2, 0]}, {"labels": [1, 7]}])
def test_averages_over_classes(name: str, average: Any, options: dict[str, Any]) -> None:
    for classes in (2, 5):
        predictions, references = labels(classes, seed=classes)
        compare(name, predictions, references, average=average, zero_division=0, **options)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("pos_label", [0, 1])
def test_binary(name: str, pos_label: int) -> None:
    compare(name, *labels(2, seed=3), average="binary", pos_label=pos_label)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("average", ["binary", "macro", "weighted"])
def test_sample_weights(name: str, average: str) -> None:
    weights = torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist()
    compare(name, *labels(2, seed=4), weights, average=average)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("zero_division", [0, 1, math.nan])
@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(
    pairs=st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), min_size=1, max_size=8),
    average=st.sampled_from(["macro", "micro", "weighted", None]),
    chosen=st.sampled_from([None, [0], [3, 1], [2, 9, 0]]),
)
def test_few_samples_leave_classes_out(
    name: str, zero_division: float, pairs: Any, average: Any, chosen: Any
) -> None:
    predictions, references = (list(side) for side in zip(*pairs, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's, about weights that sum to 0
        compare(
            name,
            predictions,
            references,
            average=average,
            labels=chosen,
            zero_division=zero_division,
        )


def test_undefined_scores_warn_by_default() -> None:
    with pytest.warns(UserWarning, match="`zero_division`"):
        figures = Precision().compute(predictions=[0, 0], references=[0, 1])
    assert figures == {"precision": 0.0}


@pytest.mark.parametrize("normalize", [True, False])
def test_accuracy(normalize: bool) -> None:
    predictions, references = labels(4, seed=1)
    for weights in (None, [index / 7 for index in range(40)]):
        figures = Accuracy(normalize=normalize).compute(
            predictions=predictions, references=references, sample_weight=weights
        )
        expected = sklearn_metrics.accuracy_score(
            references, predictions, normalize=normalize, sample_weight=weights
        )
        assert figures["accuracy"] == close(float(expected))


@pytest.mark.parametrize("multioutput", ["uniform_average", "raw_values", [0.2, 0.3, 1.0]])
@pytest.mark.parametrize("weighted", [False, True])
def test_mean_errors(multioutput: Any, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    predictions, references = torch.randn(2, 30, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(30, generator=generator) if weighted else None
    for metric, function in (
        (MSE(), "mean_squared_error"),
        (MSE(squared=False), "root_mean_squared_error"),
        (MAE(), "mean_absolute_error"),
    ):
        figures = metric.compute(
            predictions=predictions,
            references=references,
            sample_weight=weights,
            multioutput=multioutput,
        )
        expected = getattr(sklearn_metrics, function)(
            references, predictions, sample_weight=weights, multioutput=multioutput
        )
        assert figures[metric.name] == close(expected)


def test_one_output_may_have_a_dimension_of_its_own() -> None:
    predictions, references = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 4.0])
    assert MSE().compute(predictions=predictions, references=references) == {"mse": 2.0}


def marks(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    drawn = torch.randint(2, (2, 40, 3), generator=torch.Generator().manual_seed(seed))
    return drawn[0].tolist(), drawn[1].tolist()


@pytest.mark.parametrize("weights", [None, [0.5, 2.0] * 20], ids=["", "weighted samples"])
def test_several_labels_of_a_sample(weights: Any) -> None:
    predictions, references = marks(0)
    for name, (ours, theirs) in SCORES.items():
        for average in ("macro", "micro", "weighted", None):
            options: dict[str, Any] = {"average": average, "zero_division": 0}
            figures = ours(**options, multilabel=True)
            for part in (slice(0, 7), slice(7, None)):  # in chunks
                weight = None if weights is None else weights[part]
                figures.update(predictions[part], references[part], weight)
            expected = getattr(sklearn_metrics, theirs)(
                references, predictions, sample_weight=weights, **options
            )
            assert [*figures.compute().values()] == close(numpy.ravel(expected)), (name, average)
    every = {"sample_weight": weights}
    exact = Accuracy(multilabel="all").compute(
        predictions=predictions, references=references, **every
    )
    assert exact["accuracy"] == close(
        sklearn_metrics.accuracy_score(references, predictions, **every)
    )
    each = Accuracy(multilabel="each").compute(
        predictions=predictions, references=references, **every
    )
    loss = sklearn_metrics.hamming_loss(references, predictions, **every)
    assert each["accuracy"] == close(1 - loss)


def test_labels_that_are_not_known_are_left_out() -> None:
    predictions, references = [[1, 0], [0, 1]], [[1, -100], [-100, 0]]
    data: dict[str, Any] = {"predictions": predictions, "references": references}
    assert F1(average=None, multilabel=True, zero_division=0).compute(**data)["f1"].tolist() == [
        1,
        0,
    ]
    assert Accuracy(multilabel="each").compute(**data) == {"accuracy": 0.5}
    assert Accuracy(multilabel="all").compute(**data) == {"accuracy": 0.5}


def test_what_several_labels_cannot_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match='needs an `average` over the labels: "macro"'):
        F1(multilabel=True)
    with pytest.raises(ConfigError, match=r'"all" \(a sample is right where all its labels are\)'):
        Accuracy(multilabel=True)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"multilabel=.*turn scores into classes"):
        Accuracy().compute(predictions=[[0, 1]], references=[[0, 1]])
    with pytest.raises(DataError, match=r"needs 0 or 1 for each label of each sample"):
        Accuracy(multilabel="all").compute(predictions=[[0.3, 1]], references=[[0, 1]])
