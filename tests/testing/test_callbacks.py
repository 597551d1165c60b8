"""Every callback of trainkit keeps the contract, and broken ones are told what they break."""

import importlib
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit.callbacks
from tests.helpers.tiers import with_few
from trainkit import Callback, GeneralTracker, Run, StepResult
from trainkit.callbacks import (
    EMA,
    BatchSizeFinder,
    Checkpoint,
    CSVLogger,
    DeviceMonitor,
    EarlyStopping,
    Evaluation,
    FreezeUntil,
    GarbageCollection,
    GradientMonitor,
    Journal,
    JSONLLogger,
    Logger,
    LRFinder,
    LRMonitor,
    MainProcess,
    MLflowLogger,
    ModelSummary,
    NaNGuard,
    OptunaPruning,
    Predictions,
    Profiler,
    ProgressBar,
    PrometheusExporter,
    ReplicaCheck,
    Summary,
    TensorBoardLogger,
    Throughput,
    TimeLimit,
    Timer,
    WandbLogger,
)
from trainkit.testing import check_callback


def _trial() -> Any:
    """Return a trial that nobody prunes, on the process that has one."""
    from optuna.trial import FixedTrial

    return FixedTrial({}) if os.environ.get("RANK", "0") == "0" else None


MAKE: dict[str, Callable[[], Callback]] = {
    "BatchSizeFinder": BatchSizeFinder,
    "Checkpoint": lambda: Checkpoint(every_n_steps=3, keep_last=None),
    "CSVLogger": CSVLogger,
    "EarlyStopping": lambda: EarlyStopping("eval/loss", patience=100, mode="min"),
    "EMA": lambda: EMA(0.9),
    "Evaluation": lambda: Evaluation(["accuracy"], every_n_steps=3),
    "FreezeUntil": lambda: FreezeUntil(step={"*first": 4}, epoch={"*blocks.*": 1}),
    "JSONLLogger": JSONLLogger,
    "Journal": Journal,
    "LRFinder": lambda: LRFinder(num_steps=4, stop=False),
    "LRMonitor": LRMonitor,
    "Logger": lambda: Logger(GeneralTracker()),
    "MLflowLogger": MLflowLogger,
    "MainProcess": lambda: MainProcess(JSONLLogger()),
    "NaNGuard": NaNGuard,
    "OptunaPruning": lambda: OptunaPruning(_trial(), "eval/loss"),
    "Predictions": lambda: Predictions(every=2),
    "PrometheusExporter": lambda: PrometheusExporter(0),
    "ProgressBar": ProgressBar,
    "ReplicaCheck": lambda: ReplicaCheck(every_n_steps=2),
    "Summary": Summary,
    "TensorBoardLogger": TensorBoardLogger,
    "DeviceMonitor": DeviceMonitor,
    "GarbageCollection": lambda: GarbageCollection(every_n_steps=6),
    "GradientMonitor": lambda: GradientMonitor(depth=1),
    "ModelSummary": ModelSummary,
    "Profiler": lambda: Profiler(wait=1, warmup=1, active=2, repeat=2),
    "Throughput": lambda: Throughput(tokens=len, flops="auto", peak_flops=1e12),
    "Timer": Timer,
    "WandbLogger": lambda: WandbLogger(mode="offline"),
    "TimeLimit": lambda: TimeLimit(60),
}
IMPORTED = {
    "LRFinder": ["matplotlib.figure", "matplotlib.backends.backend_agg"],
    "MLflowLogger": ["mlflow"],
    "OptunaPruning": ["optuna"],
    "TensorBoardLogger": ["torch.utils.tensorboard"],
    "WandbLogger": ["wandb", "matplotlib.pyplot"],
}
FUNCTIONS = {"main_process_only"}
# These say of themselves that they change what is trained.
CHANGES = {"FreezeUntil"}


def test_every_callback_is_under_contract() -> None:
    assert {*MAKE, *FUNCTIONS} == set(trainkit.callbacks.__all__)


@pytest.mark.parametrize("name", with_few(["FreezeUntil"], sorted(MAKE)))
def test_callbacks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
    for package in IMPORTED.get(name, ()):  # once, instead of in each process of the check
        importlib.import_module(package)
    check_callback(MAKE[name], changes_training=name in CHANGES)


class Nudges(Callback):
    """Adds to the gradients."""

    def on_gradients(self, run: Run) -> None:
        for p in run.parameters:
            assert p.grad is not None
            p.grad += 1e-3 * torch.ones_like(p.grad)


class Forgets(Callback):
    """Stops after 9 steps, but counts them by an iterator, which no checkpoint holds."""

    def on_fit_start(self, run: Run) -> None:
        self.steps = itertools.count(1)

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if next(self.steps) == 9:
            run.request_stop("nine steps", agreed=True)


class StopsOnce(Callback):
    """Does not start anew in a second fit."""

    def __init__(self) -> None:
        self.stopped = False

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 7 and not self.stopped:
            self.stopped = True
            run.request_stop("seven steps", agreed=True)


class CountsFits(Callback):
    """Ends alike each time, but says so in other words."""

    def __init__(self) -> None:
        self.fits = 0

    def on_fit_start(self, run: Run) -> None:
        self.fits += 1

    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == 9:
            run.request_stop(f"nine steps, fit {self.fits}", agreed=True)


class LosesState(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Raises(Callback):
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        raise ZeroDivisionError("in a hook that seldom comes")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("broken", "options", "message"),
    [
        (Nudges, {}, "must not change what is trained"),
        (Forgets, {"changes_training": True}, "belongs in `state_dict`"),
        (StopsOnce, {"changes_training": True}, "A second `fit`"),
        (CountsFits, {"changes_training": True}, "A second `fit`.*nine steps, fit 2"),
        (LosesState, {}, "must be what it was"),
        (Raises, {}, "in a hook that seldom comes"),
    ],
)
def test_a_broken_callback_is_found(
    broken: type[Callback], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_callback(broken, processes=[1], **options)


def test_a_callback_may_change_training_if_it_says_so() -> None:
    check_callback(Nudges, processes=[1], changes_training=True)
