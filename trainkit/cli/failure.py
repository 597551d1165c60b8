"""What the launcher says after a job has failed: the first report, not a wall of later ones."""

from collections.abc import Mapping
from pathlib import Path

from trainkit.watchdog import report as reports

__all__ = ["show"]


def show(folder: Path | str, endings: Mapping[int, str] | None = None) -> str | None:
    """Return what went wrong in a job, in words; None where no process left a report.

    Args:
        folder: Where the processes of this job, and no other, wrote their reports.
        endings: How processes ended, by rank, as the launcher saw it.
    """
    found = reports.read_all(Path(folder))
    first = reports.first_of(found)
    if first is None:
        return None
    path, report = first
    parts = [report.describe()]
    endings = endings or {}
    process = report.process
    if process is not None and process != report.reporter and process in endings:
        parts.append(f"Process {process} {endings[process]}.")
    others = {r.reporter: r.secondary for _, r in found if r.reporter != report.reporter}
    for words, secondary in (("Because of it also ended", True), ("Failed by itself too", False)):
        ranks = [str(rank) for rank in sorted(others) if others[rank] == secondary]
        if ranks:
            parts.append(f"{words}: process {', '.join(ranks)}.")
    return "\n".join([*parts, f"report: {path}"])
