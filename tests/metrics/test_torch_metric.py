"""Metrics of torchmetrics are fed everything and gather nothing."""

import os
from typing import Any

import pytest
import torch

from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from trainkit.errors import DataError
from trainkit.metrics import F1, Accuracy, TorchMetric, as_metric

torchmetrics = late("torchmetrics")

PREDICTIONS = torch.tensor([0, 2, 1, 1, 0, 2, 2])
REFERENCES = torch.tensor([0, 1, 1, 1, 2, 2, 0])


def fed(thing: Any, size: int = 3) -> dict[str, float]:
    metric = as_metric(thing)
    metric.reset()
    for at in range(0, len(PREDICTIONS), size):
        metric.update(PREDICTIONS[at : at + size], REFERENCES[at : at + size])
    return metric.compute()


@pytest.mark.parametrize("size", [1, 3, 7])
def test_figures_are_those_of_our_own(size: int) -> None:
    module = torchmetrics.classification
    assert fed(module.MulticlassAccuracy(3, average="micro"), size) == pytest.approx(
        {"MulticlassAccuracy": fed(Accuracy())["accuracy"]}
    )
    assert fed(module.MulticlassF1Score(3, average="none"), size) == pytest.approx(
        {f"MulticlassF1Score/{i}": fed(F1(average=None))[f"f1/{i}"] for i in range(3)}
    )


def test_collections_keep_their_keys() -> None:
    collection = torchmetrics.MetricCollection(
        {
            "acc": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
            "rec": torchmetrics.classification.MulticlassRecall(3, average="micro"),
        }
    )
    assert fed(collection) == pytest.approx({"acc": 4 / 7, "rec": 4 / 7})


def test_whether_higher_is_better_is_what_the_metric_says() -> None:
    module = torchmetrics.classification
    accuracy, error = module.BinaryAccuracy(), module.BinaryHammingDistance()
    assert TorchMetric(accuracy).higher_is_better is True
    assert TorchMetric(error).higher_is_better is False
    assert TorchMetric(torchmetrics.classification.BinaryROC()).higher_is_better is None
    assert TorchMetric(torchmetrics.MetricCollection([accuracy])).higher_is_better is True
    assert TorchMetric(torchmetrics.MetricCollection([accuracy, error])).higher_is_better is None


def test_nothing_seen_gives_no_figures() -> None:
    metric = TorchMetric(torchmetrics.MeanSquaredError())
    metric.update(torch.tensor([]), torch.tensor([]))
    assert metric.compute() == {}


def test_an_earlier_use_of_the_metric_is_forgotten() -> None:
    used = torchmetrics.MeanSquaredError()
    used.update(torch.tensor([100.0]), torch.tensor([0.0]))
    metric = as_metric(used)
    metric.update(torch.ones(1), torch.ones(1))
    assert metric.compute() == {"MeanSquaredError": 0.0}


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="`MeanSquaredError` got 1 predictions and 2 references"):
        TorchMetric(torchmetrics.MeanSquaredError()).update(torch.ones(1), torch.ones(2))


def test_every_process_has_all_samples_and_none_gathers() -> None:
    assert run_ranks(2, _compute_on_one_rank_only) == [None, ({"SumMetric": 3.0}, True)]


def _summed() -> Any:
    from torchmetrics import Metric

    class Summed(Metric):
        """Holds a metric inside, which must not gather either."""

        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.SumMetric()

        def update(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
            self.metric.update(predictions)

        def compute(self) -> Any:
            return self.metric.compute()

    return Summed()


def _compute_on_one_rank_only(rank: int) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=os.environ["TRAINKIT_INIT_METHOD"], rank=rank, world_size=2
    )
    try:
        result = None
        if rank == 1:  # would wait for the other if it gathered
            summed = _summed()
            inner = summed.metric.distributed_available_fn
            metric = TorchMetric(summed, name="SumMetric")
            metric.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
            result = metric.compute(), summed.metric.distributed_available_fn is inner
        torch.distributed.barrier()
        return result
    finally:
        torch.distributed.destroy_process_group()
