"""What must not grow with the work, counted; and the benchmarks of growth and of GPUs run."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, growth


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the runs that are there for their time."""
    ticks = itertools.count(1.0)
    monkeypatch.setattr(growth, "seconds", lambda work: next(ticks))


def test_set_up_handles_no_sample_by_itself_and_a_resume_reads_none_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "ROUNDS", 1)  # of the times
    growth.samples(1_000)  # what is done once in a program
    few, many = growth.samples(1_000), growth.samples(100_000)
    assert abs(many["set-up calls"] - few["set-up calls"]) <= 20
    assert few["read on resume"] == many["read on resume"] == growth.BATCH


@pytest.mark.usefixtures("untimed")
def test_callbacks_that_override_nothing_cost_nothing() -> None:
    none, many = growth.idle_callbacks(0), growth.idle_callbacks(100)
    assert abs(many["calls a step"] - none["calls a step"]) <= 1


@pytest.mark.usefixtures("untimed")
def test_a_logged_figure_takes_few_calls() -> None:
    few, many = growth.logged_figures(1), growth.logged_figures(51)
    assert many["calls a step"] - few["calls a step"] <= 50 * 15


@pytest.mark.e2e
@pytest.mark.usefixtures("untimed")
def test_tensors_of_parameters_cost_what_they_cost_in_a_raw_loop() -> None:
    few, many = growth.parameter_tensors(1), growth.parameter_tensors(50)
    assert abs(many["calls over raw"] - few["calls over raw"]) <= 2


@pytest.mark.e2e
def test_a_long_history_takes_no_more_memory_than_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "RUNS", 3)
    few, many = growth.lines_of_history(1000), growth.lines_of_history(20_000)
    assert many["MB"] > 10
    for name in ("ls MB", "report MB", "cut MB"):
        assert many[name] - few[name] < many["MB"]


def test_what_grows_is_named() -> None:
    tables = {
        "callbacks that override nothing": {0: {"calls a step": 1.0}, 10: {"calls a step": 9.0}},
        "figures logged each step": {1: {"calls a step": 1.0}, 3: {"calls a step": 90.0}},
        "lines of history": {9: {"ls MB": 20.0, "report MB": 101.0, "cut MB": 15.0}},
        "samples": {
            8: {"read on resume": 4.0, "set-up calls": 10.0},
            9: {"read on resume": 9.0, "set-up calls": 90.0},
        },
        "tensors of parameters": {1: {"calls over raw": 10.0}, 9: {"calls over raw": 100.0}},
    }
    assert len(growth.check(tables)) == 6


@pytest.mark.e2e
def test_the_benchmark_of_gpus_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--output", str(place)])
    gpu.main()
    found = json.loads(place.read_text())
    assert {"bf16", "fp16", "bf16 compiled"} <= found["training"].keys()
    assert found["data"].keys() == {"0 workers", "2 workers"}
    assert found["checkpoint"]["background to plain copy"] is not None


def test_without_a_gpu_the_benchmark_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu.main()
