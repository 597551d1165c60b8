"""What the launcher says after a job has failed: the first report, not a wall of later ones."""

from pathlib import Path

from trainkit import reports

__all__ = ["show"]


def show(folder: Path | str) -> str | None:
    """Return what went wrong in a job, in words; None where no process left a report.

    Args:
        folder: Where the processes of this job, and no other, wrote their reports.
    """
    found = reports.read_all(Path(folder))
    first = reports.first_of(found)
    if first is None:
        return None
    path, report = first
    parts = [report.describe()]
    others = sorted({r.reporter for _, r in found if r.reporter != report.reporter})
    if others:
        parts.append(f"Because of it also ended: process {', '.join(map(str, others))}.")
    return "\n".join([*parts, f"report: {path}"])
