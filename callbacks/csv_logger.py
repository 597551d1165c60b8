"""Write the metrics of a run as a table."""

from trainkit.callbacks.jsonl_logger import FileLogger
from trainkit.trackers.files import CSVTracker

__all__ = ["CSVLogger"]


class CSVLogger(FileLogger):
    """Writes a CSV file, with a row for each log and evaluation.

    The columns `step`, `epoch`, `samples`, `kind` and `time/seconds` are those of `JSONLLogger`;
    each value has a column of its own, which is empty where it was not logged. Where a name comes
    for the first time the file is written anew with one more column. What is not finite is "NaN",
    "Infinity" or "-Infinity". Before a name that a spreadsheet would take for a formula, as it
    begins with `=`, `+`, `-` or `@`, stands a `'`. Hyperparameters go into `metrics.hparams.json`
    beside it.

    A resumed run first cuts what was written after its step. A new run moves the file of an older
    one to `<name>.1`, or the next number that is free. Only the main process writes.

    Args:
        path: The file; by default `<output_dir>/metrics.csv`.
    """

    _kind = CSVTracker
