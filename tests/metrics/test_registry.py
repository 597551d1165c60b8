"""Metrics are found by name, and most things can serve as one."""

import os
import subprocess
import sys

import pytest

from trainkit.errors import ConfigError
from trainkit.metrics import F1, Accuracy, as_metric, load

SHIPPED = ["accuracy", "f1", "mae", "mse", "perplexity", "precision", "recall"]


def test_every_shipped_metric_is_found_by_its_name() -> None:
    assert [load(name).name for name in SHIPPED] == SHIPPED
    assert [as_metric(name).name for name in SHIPPED] == SHIPPED


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_shipped_metrics_compute_without_evaluate_and_datasets() -> None:
    code = """
import sys
from trainkit.metrics import as_metric, load
assert load("accuracy").compute(predictions=[1, 0], references=[1, 1]) == {"accuracy": 0.5}
metric = as_metric(lambda predictions, references: 0.0)
assert not {"evaluate", "datasets", "sklearn", "torchmetrics", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_options_go_to_the_metric() -> None:
    metric = load("f1", average="macro")
    assert metric.compute(predictions=[0], references=[0]) == {"f1": 1.0}
    with pytest.raises(ConfigError, match=r"`f1` has no option \['averge'\]"):
        load("f1", averge="macro")


@pytest.mark.e2e
def test_unknown_names_list_what_there_is() -> None:
    code = """
from trainkit.errors import ConfigError
from trainkit.metrics import load
try:
    load("acuracy")
except ConfigError as error:
    print(error)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=True,
    )
    assert "no metric 'acuracy'. Did you mean `accuracy`?" in done.stdout
    assert "'perplexity'" in done.stdout
    assert "`evaluate.load`" in done.stdout


def test_a_metric_stays_what_it_is() -> None:
    metric = F1()
    assert as_metric(metric) is metric


def test_classes_and_other_things_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the class `Accuracy`. Make one: `Accuracy\(\)`"):
        as_metric(Accuracy)
    with pytest.raises(ConfigError, match=r"must be a name, .* but is 3"):
        as_metric(3)
