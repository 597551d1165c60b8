"""The callbacks that come with trainkit."""

if __name__ != "trainkit.callbacks":
    raise ImportError("Import `trainkit.callbacks`, not the folder `callbacks`.")

from pathlib import Path

from trainkit.callbacks.batch_size_finder import BatchSizeFinder
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.csv_logger import CSVLogger
from trainkit.callbacks.device_monitor import DeviceMonitor
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.callbacks.ema import EMA
from trainkit.callbacks.evaluation import Evaluation
from trainkit.callbacks.freeze_until import FreezeUntil
from trainkit.callbacks.garbage_collection import GarbageCollection
from trainkit.callbacks.gradient_monitor import GradientMonitor
from trainkit.callbacks.journal import Journal
from trainkit.callbacks.jsonl_logger import JSONLLogger
from trainkit.callbacks.logger import Logger
from trainkit.callbacks.lr_finder import LRFinder
from trainkit.callbacks.lr_monitor import LRMonitor
from trainkit.callbacks.main_process import MainProcess, main_process_only
from trainkit.callbacks.mlflow_logger import MLflowLogger
from trainkit.callbacks.model_summary import ModelSummary
from trainkit.callbacks.nan_guard import NaNGuard
from trainkit.callbacks.optuna_pruning import OptunaPruning
from trainkit.callbacks.predictions import Predictions
from trainkit.callbacks.profiler import Profiler
from trainkit.callbacks.progress_bar import ProgressBar
from trainkit.callbacks.replica_check import ReplicaCheck
from trainkit.callbacks.summary import Summary
from trainkit.callbacks.tensorboard_logger import TensorBoardLogger
from trainkit.callbacks.throughput import Throughput
from trainkit.callbacks.time_limit import TimeLimit
from trainkit.callbacks.timer import Timer
from trainkit.callbacks.wandb_logger import WandbLogger
from trainkit.training.callback import Callback

__all__ = [
    "EMA",
    "BatchSizeFinder",
    "CSVLogger",
    "Checkpoint",
    "DeviceMonitor",
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
    "ReplicaCheck",
    "Summary",
    "TensorBoardLogger",
    "Throughput",
    "TimeLimit",
    "Timer",
    "WandbLogger",
    "main_process_only",
]


def default_callbacks(output_dir: Path | None = None) -> list[Callback]:
    """Return what a `Trainer` uses that was given no callbacks: with a folder, files in it."""
    files = [] if output_dir is None else [JSONLLogger(), Journal()]
    return [ProgressBar(), Summary(), *files]
