"""What all metrics that trainkit computes itself have in common."""

import math
import re
from typing import Any

import numpy
import pytest
import torch

from trainkit.basics.device import default_kind
from trainkit.errors import ConfigError, DataError
from trainkit.metrics import (
    F1,
    MAE,
    MSE,
    Accuracy,
    LocalMetric,
    Perplexity,
    Precision,
    Recall,
    load,
)

SHIPPED = [Accuracy, F1, MAE, MSE, Perplexity, Precision, Recall]


@pytest.mark.parametrize("metric_class", SHIPPED)
def test_chunks_do_not_matter(metric_class: type[LocalMetric]) -> None:
    predictions = torch.tensor([0, 1, 1, 0, 1, 1, 0, 1])
    references = torch.tensor([0, 1, 0, 0, 1, 1, 1, 1])
    whole = metric_class().compute(predictions=predictions, references=references)
    metric = metric_class()
    for size in (1, 3, 5, 8):
        metric.reset()
        for at in range(0, 8, size):
            metric.update(predictions[at : at + size], references[at : at + size])
        assert metric.compute() == whole  # whole numbers: exact
    assert metric.keys == (metric.name,) == tuple(whole)


@pytest.mark.parametrize("metric_class", SHIPPED)
def test_nothing_seen_gives_no_figures(metric_class: type[LocalMetric]) -> None:
    metric = metric_class()
    assert metric.compute() == {}
    metric.update(torch.tensor([]), [])
    assert metric.compute() == {}
    assert metric.compute(predictions=[], references=[]) == {}


@pytest.mark.parametrize("metric_class", SHIPPED)
def test_unequal_lengths_are_an_error_with_both(metric_class: type[LocalMetric]) -> None:
    metric = metric_class()
    with pytest.raises(DataError, match=rf"`{metric.name}` got 3 predictions and 2 references"):
        metric.update([0, 1, 1], torch.tensor([0, 1]))
    with pytest.raises(DataError, match="a single NoneType"):
        metric.compute(predictions=[0])
    with pytest.raises(DataError, match="a single Tensor"):
        metric.update(torch.tensor(1.0), torch.tensor(1.0))


@pytest.mark.parametrize("metric_class", [Accuracy, F1, MSE])
def test_inputs_may_be_of_any_kind(metric_class: type[LocalMetric]) -> None:
    values, truth = [0, 1, 1], [1, 1, 0]
    expected = metric_class().compute(predictions=values, references=truth)
    for convert in (torch.tensor, numpy.array, tuple):
        made: Any = convert(values)
        assert metric_class().compute(predictions=made, references=truth) == expected
        assert metric_class().compute(predictions=values, references=convert(truth)) == expected
    halves = torch.tensor(values, dtype=torch.bfloat16)
    assert metric_class().compute(predictions=halves, references=truth) == expected


def test_per_class_figures_are_named_by_class() -> None:
    metric = F1(average=None)
    metric.update([2, 5, 5], [2, 5, 2])
    assert metric.compute() == pytest.approx({"f1/2": 2 / 3, "f1/5": 2 / 3})
    assert metric.keys is None
    recall = Recall(average=None, labels=[5, 2])
    recall.update([2, 5, 5], [2, 5, 2])
    assert recall.compute() == {"recall/5": 1.0, "recall/2": 0.5}
    assert recall.keys == ("recall/5", "recall/2")


def test_raw_values_are_named_by_output() -> None:
    metric = MAE(multioutput="raw_values")
    metric.update([[1, 2], [3, 4]], [[1, 0], [3, 0]])
    assert metric.compute() == {"mae/0": 0.0, "mae/1": 3.0}


def test_options_of_a_call_hold_for_that_call() -> None:
    metric = F1()
    metric.update([0, 1, 1, 1], [0, 1, 1, 0])
    before = metric.compute()
    other = metric.compute(average="macro")
    given = metric.compute(predictions=[0], references=[0], average="micro")
    assert metric.compute() == before == pytest.approx({"f1": 4 / 5})
    assert other == pytest.approx({"f1": (4 / 5 + 2 / 3) / 2})
    assert given == {"f1": 1.0}


def test_add_batch_starts_anew_after_compute() -> None:
    metric = Accuracy()
    for batch, expected in (([0, 1], 1.0), ([1, 0], 0.0)):
        metric.add_batch(predictions=torch.tensor(batch), references=[0, 1])
        assert metric.compute() == {"accuracy": expected}


def test_counts_are_exact_beyond_what_float32_holds() -> None:
    metric = Accuracy(normalize=False)
    metric.update(torch.zeros(2**24 + 1, dtype=torch.int8), torch.zeros(2**24 + 1))
    assert metric.compute() == {"accuracy": 2**24 + 1}


def test_scores_are_refused_where_classes_are_needed() -> None:
    with pytest.raises(DataError, match=r"\[2, 3\].*argmax"):
        Accuracy().update(torch.rand(2, 3), [0, 1])
    with pytest.raises(DataError, match="fractions"):
        F1().update([0.3, 0.7], [0, 1])
    with pytest.raises(DataError, match="needs numbers in `references`"):
        F1().update([0, 1], ["no", "yes"])


def test_outputs_must_stay_as_many() -> None:
    metric = MSE()
    metric.update([[1, 2]], [[1, 2]])
    with pytest.raises(DataError, match="`predictions` and 3 in `references`"):
        metric.update([[1, 2]], [[1, 2, 3]])
    with pytest.raises(DataError, match="3 outputs"):
        metric.update([[1, 2, 3]], [[1, 2, 3]])
    with pytest.raises(DataError, match="one weight for each"):
        metric.compute(multioutput=[1.0])


def test_binary_average_needs_two_classes() -> None:
    remedy = re.escape('`metrics.load("f1", average="macro")`')
    with pytest.raises(DataError, match=rf"saw \[0, 1, 2\]\..*{remedy}"):
        F1().compute(predictions=[0, 1, 2], references=[0, 1, 2])
    with pytest.raises(DataError, match=r"saw \[0, .*, 9\] and 20 more\."):
        F1().compute(predictions=range(30), references=range(30))
    remedy = re.escape('`metrics.load("recall", pos_label=2)`')
    with pytest.raises(DataError, match=f"the class 1, but .*{remedy}"):
        Recall().compute(predictions=[0, 2], references=[0, 2])


@pytest.mark.parametrize("metric_class", SHIPPED)
def test_each_says_whether_higher_is_better(metric_class: type[LocalMetric]) -> None:
    assert metric_class().higher_is_better == (metric_class not in (MSE, MAE, Perplexity))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"average": "mean"}, "must be one of"),
        ({"labels": [0, 1]}, "leave `labels` out"),
        ({"average": "macro", "pos_label": 0}, "`labels=\\[0\\]`"),
        ({"average": "macro", "labels": [1, 1]}, "each once"),
        ({"average": "macro", "labels": []}, "at least one class"),
        ({"zero_division": 0.5}, "must be 0, 1, NaN"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        F1(**options)
    with pytest.raises(ConfigError, match=text):
        F1().compute(predictions=[0], references=[0], **options)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no option \['averge'\].*'average'"):
        F1().compute(predictions=[0], references=[0], averge="macro")
    with pytest.raises(ConfigError, match="`multioutput` of `mae`"):
        MAE(multioutput="mean")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="2 predictions, but 1 entries in `sample_weight`"):
        F1().update([0, 1], [0, 1], [1.0])


def test_perplexity_weighs_losses_by_tokens() -> None:
    metric = Perplexity()
    metric.update(torch.tensor([2.0, 1.0]), torch.tensor([1, 3]))
    metric.update([math.nan], [0])  # a mean over no tokens
    assert metric.uses == "loss"
    assert metric.compute() == pytest.approx({"perplexity": math.exp(5 / 4)}, rel=1e-15)
    metric.update([math.nan], [1])
    assert math.isnan(metric.compute()["perplexity"])
    assert Perplexity().compute(predictions=[1e6], references=[1]) == {"perplexity": math.inf}


def test_a_mean_over_no_weight_is_not_a_number() -> None:
    zero = [0.0, 0.0]
    for metric in (Accuracy(), MSE()):
        metric.update([0, 1], [0, 1], zero)
        assert math.isnan(metric.compute()[metric.name])


@pytest.mark.gpu
@pytest.mark.parametrize("metric_class", SHIPPED)
def test_predictions_may_be_on_the_gpu_and_references_not(
    metric_class: type[LocalMetric],
) -> None:
    predictions, references, weights = [0, 1, 1, 0], [1, 1, 0, 0], [0.5, 1.0, 2.0, 0.25]
    expected = metric_class().compute(predictions=predictions, references=references)
    metric = metric_class()
    for _ in range(2):
        metric.update(torch.tensor(predictions, device=default_kind()), references)
    assert metric.compute() == expected
    if metric_class is not Perplexity:
        metric.update(references, torch.tensor(predictions, device=default_kind()), weights)


@pytest.mark.parametrize("name", ["accuracy", "f1", "precision", "recall"])
@pytest.mark.parametrize("filled", [-100, 1])
def test_samples_whose_class_is_ignored_do_not_count(name: str, filled: int) -> None:
    predictions, references = torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 1])
    weights = torch.tensor([1.0, 2, 3, 4])
    more = torch.full((2,), filled)
    ignored = torch.full((2,), -100)
    for given in (None, weights):
        metric, other = load(name), load(name)
        assert isinstance(metric, LocalMetric)
        assert isinstance(other, LocalMetric)
        metric.update(predictions, references, given)
        heavier = None if given is None else torch.cat([given, torch.tensor([9.0, 9])])
        other.update(torch.cat([predictions, more]), torch.cat([references, ignored]), heavier)
        assert metric.compute() == other.compute()


def test_where_no_sample_has_a_class_no_figure_is_made_up() -> None:
    ignored = torch.full((3,), -100)
    accuracy = load("accuracy")
    accuracy.update(ignored, ignored)
    assert math.isnan(accuracy.compute()["accuracy"])
    f1 = load("f1", average="macro")
    f1.update(ignored, ignored)
    assert f1.compute() == {}


def test_an_ignored_class_cannot_be_predicted() -> None:
    with pytest.raises(DataError, match="-100 in `predictions` of samples that have a class"):
        load("f1").update(torch.tensor([-100, 1]), torch.tensor([0, 1]))
    accuracy = load("accuracy")
    accuracy.update(torch.tensor([-100, 1]), torch.tensor([0, 1]))
    assert accuracy.compute() == {"accuracy": 0.5}


@pytest.mark.parametrize("name", ["mae", "mse"])
def test_whole_numbers_that_were_filled_up_are_no_perfect_predictions(name: str) -> None:
    filled = torch.tensor([[1, 2, -100], [1, 2, 3]])
    with pytest.raises(DataError, match="-100 in `references` of whole numbers"):
        load(name).update(filled, filled)
    load(name).update(filled.float(), filled.float())
    load(name).update(filled[:, 2], filled[:, 2])
    nans = torch.tensor([[1.0, math.nan], [1, 2]])
    metric = load(name)
    metric.update(nans, nans)
    assert math.isnan(metric.compute()[name])
