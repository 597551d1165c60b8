"""What the launcher says after a job has failed: the first report, not a wall of later ones."""

from collections.abc import Mapping
from pathlib import Path

from trainkit import reports

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
    if report.kind == "lost" and report.process is not None and report.process in endings:
        parts.append(f"Process {report.process} {endings[report.process]}.")
    others = sorted({r.reporter for _, r in found if r.reporter != report.reporter})
    if others:
        parts.append(f"Because of it also ended: process {', '.join(map(str, others))}.")
    return "\n".join([*parts, f"report: {path}"])
