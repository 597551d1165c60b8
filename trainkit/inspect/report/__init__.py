"""Reports of runs: a page and a picture, from the files that `JSONLLogger` leaves behind."""

from trainkit.inspect.report.records import RunLog, read_run, read_runs

__all__ = ["RunLog", "read_run", "read_runs"]
