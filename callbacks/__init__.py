"""The callbacks that come with trainkit."""

if __name__ != "trainkit.callbacks":
    raise ImportError("Import `trainkit.callbacks`, not the folder `callbacks`.")

from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.lazy import lazy_exports

if TYPE_CHECKING:
    import trainkit.training.callback
    from trainkit.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from trainkit.callbacks.checkpoint import Checkpoint as Checkpoint
    from trainkit.callbacks.csv_logger import CSVLogger as CSVLogger
    from trainkit.callbacks.device_monitor import DeviceMonitor as DeviceMonitor
    from trainkit.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from trainkit.callbacks.ema import EMA as EMA
    from trainkit.callbacks.evaluation import Evaluation as Evaluation
    from trainkit.callbacks.freeze_until import FreezeUntil as FreezeUntil
    from trainkit.callbacks.garbage_collection import GarbageCollection as GarbageCollection
    from trainkit.callbacks.gradient_monitor import GradientMonitor as GradientMonitor
    from trainkit.callbacks.journal import Journal as Journal
    from trainkit.callbacks.jsonl_logger import JSONLLogger as JSONLLogger
    from trainkit.callbacks.logger import Logger as Logger
    from trainkit.callbacks.lr_finder import LRFinder as LRFinder
    from trainkit.callbacks.lr_monitor import LRMonitor as LRMonitor
    from trainkit.callbacks.main_process import (
        MainProcess as MainProcess,
        main_process_only as main_process_only,
    )
    from trainkit.callbacks.mlflow_logger import MLflowLogger as MLflowLogger
    from trainkit.callbacks.model_summary import ModelSummary as ModelSummary
    from trainkit.callbacks.nan_guard import NaNGuard as NaNGuard
    from trainkit.callbacks.optuna_pruning import OptunaPruning as OptunaPruning
    from trainkit.callbacks.predictions import Predictions as Predictions
    from trainkit.callbacks.profiler import Profiler as Profiler
    from trainkit.callbacks.progress_bar import ProgressBar as ProgressBar
    from trainkit.callbacks.prometheus_exporter import PrometheusExporter as PrometheusExporter
    from trainkit.callbacks.replica_check import ReplicaCheck as ReplicaCheck
    from trainkit.callbacks.summary import Summary as Summary
    from trainkit.callbacks.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
    from trainkit.callbacks.throughput import Throughput as Throughput
    from trainkit.callbacks.time_limit import TimeLimit as TimeLimit
    from trainkit.callbacks.timer import Timer as Timer
    from trainkit.callbacks.wandb_logger import WandbLogger as WandbLogger

__all__, __getattr__, __dir__ = lazy_exports(__name__)


def default_callbacks(
    output_dir: Path | None = None,
) -> "list[trainkit.training.callback.Callback]":
    """Return what a `Trainer` uses that was given no callbacks: with a folder, files in it."""
    from trainkit.callbacks import Journal, JSONLLogger, ProgressBar, Summary  # lazy, too

    files = [] if output_dir is None else [JSONLLogger(), Journal()]
    return [ProgressBar(), Summary(), *files]
