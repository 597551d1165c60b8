"""The public names are the ones that stand here; a new one is added on purpose."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PUBLIC = [
    "Accelerator",
    "Alternating",
    "AutocastKwargs",
    "Callback",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMissing",
    "Combined",
    "Communicator",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataError",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedError",
    "DistributedType",
    "FitResult",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Interrupted",
    "LRSchedule",
    "LocalSGD",
    "NonFiniteError",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Run",
    "StepOutput",
    "StepResult",
    "TorchDynamoPlugin",
    "TrainState",
    "Trainer",
    "TrainkitError",
    "Watchdog",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "extract_model_from_parallel",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "init_empty_weights",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "wait_for_everyone",
]
CALLBACKS = [
    "BatchSizeFinder",
    "CSVLogger",
    "Checkpoint",
    "DeviceMonitor",
    "EMA",
    "EarlyStopping",
    "Evaluation",
    "FreezeUntil",
    "GarbageCollection",
    "GradientMonitor",
    "JSONLLogger",
    "Journal",
    "LRFinder",
    "LRMonitor",
    "Logger",
    "MLflowLogger",
    "MainProcess",
    "ModelSummary",
    "NaNGuard",
    "OptunaPruning",
    "Predictions",
    "Profiler",
    "ProgressBar",
    "PrometheusExporter",
    "ReplicaCheck",
    "Summary",
    "TensorBoardLogger",
    "Throughput",
    "TimeLimit",
    "Timer",
    "WandbLogger",
    "main_process_only",
]
MODULES_OVER_TORCH = 67  # three of them are folders

COUNT = """
import json, sys
import torch
before = set(sys.modules)
from trainkit import Trainer
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# Each costs seconds, and is imported where it is used.
HEAVY = {
    "datasets",
    "evaluate",
    "mlflow",
    "optuna",
    "pandas",
    "scipy",
    "sklearn",
    "tensorboard",
    "torchmetrics",
    "tqdm",
    "transformers",
    "wandb",
}


@pytest.mark.parametrize(
    ("module", "names"), [("trainkit", PUBLIC), ("trainkit.callbacks", CALLBACKS)]
)
def test_the_public_names_are_these(module: str, names: list[str]) -> None:
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == sorted(names)
    assert set(names) <= set(dir(loaded))
    for name in names:
        value = getattr(loaded, name)
        assert isinstance(value, str) or (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    loaded = importlib.import_module("trainkit")
    with pytest.raises(AttributeError, match="has no attribute 'Trianer'"):
        _ = loaded.Trianer


def test_the_import_is_light() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    added = json.loads(result.stdout)
    assert not {name.split(".")[0] for name in added} & HEAVY
    assert len(added) <= MODULES_OVER_TORCH, added


def test_neither_face_imports_what_compiles() -> None:
    names = "Accelerator, Trainer; from trainkit.callbacks import Checkpoint, Evaluation, Summary"
    code = f"import sys; from trainkit import {names}; print('torch._dynamo' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "False\n"  # as long as the import of torch itself
