"""Tests of the figures of the machine."""

import sys

import pytest
import torch

from tests.helpers.callbacks import Logged
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, Run
from trainkit.callbacks import DeviceMonitor
from trainkit.callbacks.device_monitor import GIB

ON_CPU = {"device/cpu_cores", "device/host_memory_gib", "device/host_memory_peak_gib"}
ON_CUDA = {"device/memory_allocated_gib", "device/memory_reserved_gib", "device/memory_peak_gib"}


class _Holds(Callback):
    """Keeps this many bytes in memory that is in use."""

    def __init__(self, size: int) -> None:
        self.size = size

    def on_fit_start(self, run: Run) -> None:
        self.memory = torch.ones(self.size // 4)


def _logged(*others: Callback) -> dict[int, dict[str, float]]:
    logs = Logged("device/")
    callbacks = [*others, DeviceMonitor(), logs]
    trainer = make_trainer(callbacks=callbacks, log_every_n_steps=4)
    fit(trainer)
    trainer.close()
    return logs.seen


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell the peak alone")
def test_memory_and_work_of_the_process_at_log_steps() -> None:
    logged = _logged(_Holds(GIB // 8))
    assert list(logged) == [4, 8]
    for figures in logged.values():
        assert set(figures) - ON_CUDA == ON_CPU
        assert figures["device/host_memory_peak_gib"] > figures["device/host_memory_gib"] * 0.9
        assert figures["device/host_memory_gib"] > 1 / 8
        assert figures["device/cpu_cores"] >= 0


def _holds_on_one(rank: int) -> float:
    return _logged(_Holds(GIB // 2 if rank else 4))[4]["device/host_memory_gib"]


@pytest.mark.e2e
def test_memory_is_that_of_the_process_that_has_most() -> None:
    first, second = run_ranks(2, _holds_on_one)
    assert first == second > 1 / 2


@pytest.mark.gpu
def test_memory_of_the_gpu() -> None:
    for figures in _logged().values():
        assert set(figures) - {"device/utilization_percent"} == ON_CPU | ON_CUDA
        assert 0 < figures["device/memory_allocated_gib"] <= figures["device/memory_peak_gib"]
        assert figures["device/memory_allocated_gib"] <= figures["device/memory_reserved_gib"]
