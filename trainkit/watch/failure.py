"""Report that this process failed in a run."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.distributed import Processes
from trainkit.errors import text_of
from trainkit.hints import hint_for
from trainkit.host import process_memory
from trainkit.watch import exit, report as reports
from trainkit.watch.job_watch import JobWatch

__all__ = ["report_failure"]


def report_failure(
    error: BaseException, processes: Processes, place: dict[str, Any], output_dir: Path | None
) -> None:
    """Write a report of an error, and tell the other processes.

    Does not return where the error only came from the end of another process, which is the one
    that reports.

    Args:
        place: Where the run was: `step`, `epoch`, `phase`, `samples`.
        output_dir: Of the run.
    """
    origin = getattr(error, "origin", None)  # the process that an error of all came from
    alone = processes.size == 1
    report = reports.Report(
        kind="error",
        cause=exit.sentence(error),
        process=processes.rank if origin is None else origin,
        processes=processes.size,
        reporter=processes.rank,
        secondary=exit.is_secondary(error),
        hint=hint_for(type(error).__name__, text_of(error), alone=alone),
        place=place,
        error=reports.error_parts(error),
        memory=process_memory(),
    )
    folder = reports.folder_for(output_dir)
    if isinstance(processes.watch, JobWatch):
        processes.watch.fail(error, report, folder)
    elif folder is not None:
        with suppress(OSError):  # the error itself is what matters
            report.write(folder)
