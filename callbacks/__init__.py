"""The callbacks that come with trainkit."""

if __name__ != "trainkit.callbacks":
    raise ImportError("Import `trainkit.callbacks`, not the folder `callbacks`.")

from trainkit.callback import Callback
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.callbacks.evaluation import Evaluation
from trainkit.callbacks.jsonl_logger import JSONLLogger
from trainkit.callbacks.lr_monitor import LRMonitor
from trainkit.callbacks.main_process import MainProcess, main_process_only
from trainkit.callbacks.nan_guard import NaNGuard
from trainkit.callbacks.progress_bar import ProgressBar
from trainkit.callbacks.summary import Summary
from trainkit.callbacks.tensorboard_logger import TensorBoardLogger
from trainkit.callbacks.time_limit import TimeLimit

__all__ = [
    "Checkpoint",
    "EarlyStopping",
    "Evaluation",
    "JSONLLogger",
    "LRMonitor",
    "MainProcess",
    "NaNGuard",
    "ProgressBar",
    "Summary",
    "TensorBoardLogger",
    "TimeLimit",
    "main_process_only",
]


def default_callbacks() -> list[Callback]:
    """Return what a `Trainer` uses that was given no callbacks."""
    return [ProgressBar(), Summary()]
