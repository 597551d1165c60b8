"""Any function of predictions and references is a metric."""

from functools import partial
from typing import Any

import numpy
import pytest
import torch

from tests.helpers.needs import late
from trainkit.errors import ConfigError, DataError
from trainkit.metrics import FunctionMetric, as_metric, scores

sklearn_metrics = late("sklearn.metrics")


class Recorder:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any]] = []

    def __call__(self, predictions: Any, references: Any) -> float:
        self.calls.append((predictions, references))
        return 1.0


def joined(*chunks: Any) -> Any:
    """Return what a function gets as predictions where these were the chunks."""
    recorder = Recorder()
    metric = FunctionMetric(recorder)
    for chunk in chunks:
        metric.update(chunk, chunk)
    assert metric.compute() == {"Recorder": 1.0}
    assert len(recorder.calls) == 1
    return recorder.calls[0][0]


def exact_match(predictions: list[str], references: list[str]) -> float:
    return sum(map(str.__eq__, predictions, references)) / len(references)


def test_function_is_called_once_with_everything() -> None:
    metric = as_metric(exact_match)
    metric.update(["a", "b"], ["a", "c"])
    metric.update(["d"], ["d"])
    assert metric.compute() == {"exact_match": 2 / 3}
    metric.reset()
    assert metric.compute() == {}


def test_tensors_are_joined_without_graph() -> None:
    result = joined(torch.ones(2, 3, requires_grad=True), torch.zeros(1, 3))
    assert torch.equal(result, torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))
    assert not result.requires_grad


def test_arrays_are_joined() -> None:
    assert joined(numpy.ones((2, 3)), numpy.ones((1, 3))).shape == (3, 3)


def test_tensors_of_other_widths_become_one_entry_per_sample() -> None:
    assert [len(row) for row in joined(torch.zeros(2, 3), torch.zeros(1, 5))] == [3, 3, 5]


def test_structures_are_joined_field_by_field() -> None:
    chunk = {
        "logits": torch.zeros(2, 4),
        "spans": (torch.zeros(2), torch.zeros(2)),
        "id": ["x", "y"],
    }
    result = joined(chunk, chunk)
    assert result["logits"].shape == (4, 4)
    assert [len(field) for field in result["spans"]] == [4, 4]
    assert result["id"] == ["x", "y", "x", "y"]


def test_lists_are_copied() -> None:
    chunk = ["a"]
    metric = FunctionMetric(exact_match)
    metric.update(chunk, chunk)
    chunk.clear()
    assert metric.compute() == {"exact_match": 1.0}


def test_forms_must_not_change() -> None:
    with pytest.raises(DataError, match="a mapping of \\['a'\\], and later Tensor"):
        joined({"a": torch.zeros(1)}, torch.zeros(1))


def test_unequal_lengths_are_refused() -> None:
    metric = FunctionMetric(exact_match)
    with pytest.raises(DataError, match="`exact_match` got 2 predictions and 1 references"):
        metric.update(torch.zeros(2), ["a"])
    with pytest.raises(DataError, match="fields have \\[1, 2\\] samples"):
        metric.update({"a": torch.zeros(1), "b": torch.zeros(2)}, ["a"])


def test_names() -> None:
    assert as_metric(partial(exact_match)).name == "exact_match"
    assert as_metric(lambda predictions, references: 1.0).name == "lambda"
    metric = FunctionMetric(lambda predictions, references: torch.tensor(2.0), name="two")
    metric.update([0], [0])
    assert metric.compute() == {"two": 2.0}


def test_a_module_without_parameters_is_a_function() -> None:
    metric = as_metric(torch.nn.MSELoss())
    metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert metric.compute() == {"MSELoss": 2.0}


def test_whether_higher_is_better_is_for_the_user_to_say() -> None:
    assert FunctionMetric(exact_match).higher_is_better is None
    assert FunctionMetric(exact_match, higher_is_better=True).higher_is_better is True
    with pytest.raises(ConfigError, match="must be True, False or None, but is 'max'"):
        FunctionMetric(exact_match, higher_is_better="max")  # type: ignore[arg-type]


def test_functions_of_other_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes \(evaluation: Any\).*two parameters"):
        as_metric(_of_one_argument)


def test_functions_in_the_manner_of_sklearn_get_the_true_values_first() -> None:
    for function, uses in ((_on_classes, "predictions"), (_on_scores, "scores")):
        metric = as_metric(function)
        assert metric.uses == uses
        metric.update(torch.tensor([3.0]), torch.tensor([1.0]))
        assert metric.compute() == {function.__name__: 1.0 - 3.0}
    assert as_metric(sklearn_metrics.log_loss).uses == "probabilities"


def test_functions_that_call_what_wants_scores_must_say_what_they_get() -> None:
    def auc(predictions: Any, references: Any) -> Any:
        return sklearn_metrics.roc_auc_score(references, predictions)

    with pytest.raises(ConfigError, match=r"calls `roc_auc_score`.*`metrics.scores\(auc\)`"):
        as_metric(auc)
    assert scores(auc).uses == "scores"
    assert FunctionMetric(auc, uses="predictions").uses == "predictions"
    with pytest.raises(ConfigError, match="`uses` of `auc` must be one of"):
        FunctionMetric(auc, uses="loss")


def _of_one_argument(evaluation: Any) -> float:
    return 0.0


def _on_classes(y_true: Any, y_pred: Any) -> float:
    return float(y_true - y_pred)


def _on_scores(y_true: Any, y_score: Any) -> float:
    return float(y_true - y_score)
