"""Modules of `evaluate` as our metrics, and our metrics as modules of `evaluate`."""

import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.errors import ConfigError, DataError
from trainkit.metrics import (
    F1,
    MAE,
    MSE,
    Accuracy,
    EvaluateMetric,
    Perplexity,
    as_evaluate,
    as_metric,
    load,
)

SCRIPT = '''
import datasets
import evaluate


class Shares(evaluate.Metric):
    """How often each of the words is right."""

    def _info(self):
        feature = datasets.Value("string")
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="",
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions, references, scale=1.0):
        right = [p == r for p, r in zip(predictions, references)]
        return {"share": scale * sum(right) / len(right), "by": {"count": len(right)}}
'''


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluate = pytest.importorskip("evaluate")
    folder = tmp_path_factory.mktemp("evaluate")
    before = evaluate.config.HF_METRICS_CACHE, evaluate.config.HF_MODULES_CACHE
    evaluate.config.HF_METRICS_CACHE = str(folder / "metrics")
    evaluate.config.HF_MODULES_CACHE = str(folder / "modules")
    path = list(sys.path)  # another file of tests may have added the cache of the machine
    sys.path[:] = [entry for entry in path if not (Path(entry) / "evaluate_modules").is_dir()]
    _forget_modules()
    yield evaluate
    _forget_modules()
    sys.path[:] = path
    evaluate.config.HF_METRICS_CACHE, evaluate.config.HF_MODULES_CACHE = before


def _forget_modules() -> None:
    """Let `evaluate` import its modules from the folder of now."""
    for name in [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]:
        del sys.modules[name]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "shares" / "shares.py"
    path.parent.mkdir()
    path.write_text(SCRIPT, encoding="utf-8")
    return str(path)


def test_a_module_is_asked_once_with_everything(script: str) -> None:
    metric = load(script)
    assert isinstance(metric, EvaluateMetric)
    assert metric.name == "shares"
    metric.update(["a", "b"], ["a", "x"])
    metric.update(["c"], ["c"])
    assert metric.compute() == {"share": 2 / 3, "by/count": 3.0}
    assert metric.compute(predictions=["a"], references=["a"], scale=2)["share"] == 2.0
    metric.reset()
    assert metric.compute() == {}


def test_modules_are_recognised(script: str, library: Any) -> None:
    module = library.load(script)
    metric = as_metric(library.combine([module, as_evaluate(Accuracy())]))
    assert metric.name == "shares+accuracy"
    with pytest.raises(DataError, match="`shares` got 1 predictions and 2 references"):
        as_metric(module).update(["a"], ["a", "b"])
    scaled = EvaluateMetric(module, scale=10)
    scaled.update(["a"], ["a"])
    assert scaled.compute()["share"] == 10.0
    assert module.keep_in_memory is False


def test_combined_modules_are_asked_once(library: Any) -> None:
    metric = as_metric(library.combine([as_evaluate(F1()), as_evaluate(Accuracy())]))
    metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    assert metric.compute() == pytest.approx({"f1": 2 / 3, "accuracy": 2 / 3})


def test_a_module_that_gathers_itself_is_refused(script: str, library: Any) -> None:
    module = library.load(script, num_process=2, process_id=1)
    with pytest.raises(ConfigError, match="`num_process=2`"):
        as_metric(module)


def test_no_cache_file_is_written(tmp_path: Path, script: str, library: Any) -> None:
    metric = as_metric(library.load(script, cache_dir=str(tmp_path / "cache")))
    metric.update(["a"], ["a"])
    metric.compute()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_our_metrics_have_a_form_of_evaluate(library: Any) -> None:
    form = as_evaluate(Accuracy())
    assert isinstance(form, library.Metric)
    assert form.name == "accuracy"
    for chunk in ([0, 1], [1, 1, 0]):
        form.add_batch(predictions=torch.tensor(chunk), references=[1] * len(chunk))
    assert form.compute() == {"accuracy": 3 / 5}
    assert form.compute(predictions=[1], references=[1], normalize=False) == {"accuracy": 1.0}


def test_options_reach_the_form_of_evaluate() -> None:
    predictions, references = [0, 2, 1, 0, 0, 1], [0, 1, 2, 0, 1, 2]
    form = as_evaluate(F1(average="macro"))
    result = form.compute(predictions=predictions, references=references)
    assert result == F1().compute(predictions=predictions, references=references, average="macro")
    by_class = form.compute(predictions=predictions, references=references, average=None)
    assert by_class["f1"].tolist() == pytest.approx([0.8, 0, 0])
    weighted = form.compute(predictions=[0, 1], references=[0, 0], sample_weight=[3.0, 1.0])
    assert weighted["f1"] == pytest.approx(
        F1(average="macro").compute(
            predictions=[0, 1], references=[0, 0], sample_weight=[3.0, 1.0]
        )["f1"]
    )


def test_numbers_may_have_one_or_several_outputs() -> None:
    form = as_evaluate(MSE())
    assert form.name == "mse"
    assert form.compute(predictions=[2.5, 0.0], references=torch.tensor([3.0, -0.5])) == {
        "mse": 0.25
    }
    rows = torch.tensor([[0.5, 1.0], [-1.0, 1.0], [7.0, -6.0]])
    truth = [[0, 2], [-1, 2], [8, -5]]
    result = form.compute(predictions=rows, references=truth, multioutput="raw_values")
    assert result["mse"].tolist() == pytest.approx([5 / 12, 1.0])
    assert as_evaluate(MAE()).compute(predictions=[1, 2], references=[1, 4]) == {"mae": 1.0}


def test_perplexity_has_a_form_of_evaluate() -> None:
    result = as_evaluate(Perplexity()).compute(predictions=[1.0, 2.0], references=[1, 3])
    assert result == pytest.approx({"perplexity": math.exp(7 / 4)})


def test_a_form_of_evaluate_is_a_metric_again() -> None:
    metric = as_metric(as_evaluate(MSE()))
    metric.update(torch.ones(2, 3), torch.zeros(2, 3))
    metric.update(torch.ones(1, 3), torch.zeros(1, 3))
    assert metric.compute() == {"mse": 1.0}
    metric = as_metric(as_evaluate(F1()))
    metric.update(torch.tensor([1, 0]), torch.tensor([1, 1]))
    assert metric.compute() == pytest.approx({"f1": 2 / 3})
