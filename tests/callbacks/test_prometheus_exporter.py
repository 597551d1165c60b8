"""Tests of what Prometheus reads of a run."""

import re
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, Run
from trainkit.callbacks import Checkpoint, PrometheusExporter
from trainkit.types import StepResult


class _Asks(Callback):
    """Reads what is served after a step."""

    def __init__(self, exporter: PrometheusExporter, step: int) -> None:
        self._exporter, self._step = exporter, step
        self.told: dict[str, float] = {}

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == self._step and run.is_main_process:
            lines = _read(self._exporter.port).splitlines()
            pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
            self.told = {name: float(value) for name, value in pairs}


def _read(port: int) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _told(rank: int, folder: Path) -> dict[str, float]:
    exporter = PrometheusExporter(0)
    asks = _Asks(exporter, 5)
    callbacks = [exporter, Checkpoint(every_n_steps=2), asks]
    fit(make_trainer(max_steps=6, log_every_n_steps=1, output_dir=folder, callbacks=callbacks))
    if rank == 0:
        with pytest.raises(ConnectionRefusedError):  # it serves no longer
            _read(exporter.port)
    return asks.told


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.e2e)])
def test_prometheus_reads_the_run(processes: int, tmp_path: Path) -> None:
    before = time.time()
    told, *others = run_ranks(processes, _told, tmp_path)
    assert others in ([], [{}])
    assert (told["trainkit_step"], told["trainkit_skipped_steps"]) == (5, 0)
    assert told["trainkit_samples_total"] > 0
    for kind in ("step", "checkpoint"):
        assert before < told[f"trainkit_last_{kind}_timestamp_seconds"] < time.time()
    assert any(re.fullmatch(r'trainkit_value\{name="train/loss"\}', name) for name in told)


def test_a_port_that_is_taken_is_told() -> None:
    first, second = PrometheusExporter(0), PrometheusExporter(0)
    second.name = "second"

    class Collides(Callback):
        def on_fit_start(self, run: Run) -> None:
            second.port = first.port

    with pytest.raises(ConfigError, match=r"cannot listen on `127.0.0.1:\d+`: .*in use"):
        fit(make_trainer(max_steps=1, callbacks=[first, Collides(), second]))
    with pytest.raises(ConfigError, match="`port` must be from 0 to 65535, but is 70000"):
        PrometheusExporter(70000)
