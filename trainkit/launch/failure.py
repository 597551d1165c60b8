"""What the launchers say after a job has failed: one report for all, not a wall of later ones."""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.basics.console import put
from trainkit.basics.written_files import replace_file
from trainkit.launch.link import FAILED
from trainkit.watch import report as reports
from trainkit.watch.report import Report

if TYPE_CHECKING:
    from trainkit.launch.meeting import Meeting
    from trainkit.launch.supervisor import Outcome

_GATHER_SECONDS = 45.0  # in which machines end their processes, and say how
_LONGEST_REPORT = 200_000  # characters that travel


def explain(outcome: "Outcome", meeting: "Meeting") -> bool:
    """Print once why the job failed, if it did; return whether there are reports to keep.

    Machine 0 does it for all; where it is gone, each of the others.
    """
    link = meeting.link
    was_asked = outcome.was_asked and not outcome.failures and meeting.size == 1
    if outcome.code == 0 or was_asked:
        return False
    stories = link.gather(_story(outcome, meeting), _GATHER_SECONDS)
    if stories is None:
        cause = "the job has failed" if link.end is None else link.end.cause
        put(f"trainkit: {cause} (the report is on {link.name(0)})", file=sys.stderr)
        return False
    for machine, story in stories.items():
        if machine != meeting.machine and story["report"] is not None:
            with suppress(OSError, TypeError):
                Report(**story["report"]).write(outcome.reports)
    badly = {int(rank): text for each in stories.values() for rank, text in each["badly"].items()}
    well = {int(rank): text for each in stories.values() for rank, text in each["well"].items()}
    text = show(outcome.reports, well | badly)
    lines = [f"trainkit: process {rank} {what}" for rank, what in badly.items()]
    lines = lines if text is None else [text]
    job = _job_report(outcome.reports, badly, meeting)
    if path := _write(job, outcome.reports, meeting):
        lines.append(f"report of the job: {path}")
    if meeting.size > 1:
        cause = str(job["cause"])
        headline = cause if cause.startswith("machine ") else f"{job['where']}: {cause}"
        cut_off = {each["cut_off"] for each in stories.values()} - {""}
        lines = [*(f"trainkit: {each}" for each in (headline, *sorted(cut_off))), *lines]
    put("\n".join(lines or [f"trainkit: {job['cause']}"]), file=sys.stderr)
    return True


def show(folder: Path | str, endings: Mapping[int, str] | None = None) -> str | None:
    """Return what went wrong in a job, in words; None where no process left a report.

    Args:
        folder: Where the processes of this job, and no other, wrote their reports.
        endings: How processes ended, by rank, as the launcher saw it.
    """
    written = reports.read_all(Path(folder))
    first = reports.first_of(written)
    if first is None:
        return None
    path, report = first
    parts = [report.describe()]
    endings = endings or {}
    process = report.process
    if process is not None and process != report.reporter and process in endings:
        parts.append(f"Process {process} {endings[process]}.")
    others = [r.reporter for _, r in written if not (r.secondary or r.reporter == report.reporter)]
    if others:
        parts.append(f"Failed by itself too: process {', '.join(map(str, sorted(others)))}.")
    return "\n".join([*parts, f"report: {path}"])


def _story(outcome: "Outcome", meeting: "Meeting") -> dict[str, Any]:
    """Return how the processes of this machine ended, with the report that tells the cause."""
    first = reports.first_of(reports.read_all(outcome.reports))
    told = None if first is None else asdict(first[1])
    well, badly = outcome.endings, outcome.failures
    return {
        "well": {str(rank): text for rank, text in well.items()},
        "badly": {str(rank): text for rank, text in badly.items()},
        "report": told if len(json.dumps(told)) < _LONGEST_REPORT else None,
        "cut_off": meeting.cut_off(),
    }


def _job_report(folder: Path, failures: Mapping[int, str], meeting: "Meeting") -> dict[str, Any]:
    """Return where and why a job failed, with the report of the process that failed first."""
    first = reports.first_of(reports.read_all(folder))
    report = None if first is None else first[1]
    end = meeting.link.end
    assert end is not None  # else the code of this launcher is 0
    machine, process, step, cause = end.machine, None, None, end.cause
    if report is not None:
        process, step = report.process, report.place.get("step")
        if end.kind == FAILED:
            machine, cause = (process or 0) * meeting.size // report.processes, report.cause
    elif end.kind == FAILED:
        process = next(iter(failures), None)
    known = {"process": process, "step": step}
    where = [meeting.link.name(machine), *(f"{k} {v}" for k, v in known.items() if v is not None)]
    return {
        "where": ", ".join(where),
        "machine": machine,
        "host": meeting.cards[machine]["host"],
        **known,
        "cause": cause,
        "hint": "" if report is None else report.hint,
        "machines": meeting.size,
        "endings": failures,
        "report": None if report is None else asdict(report),
    }


def _write(job: dict[str, Any], folder: Path, meeting: "Meeting") -> Path | None:
    """Write the report of the job into `output_dir`, and return its path.

    Where there is none, or where this machine cannot write into it, it goes beside the reports of
    the processes; for one machine these do.
    """
    name = time.strftime("%Y%m%d-%H%M%S-job.json", time.gmtime())
    paths = [folder.parent / name] if meeting.size > 1 else []
    with suppress(OSError):
        paths.insert(0, Path((folder / "output_dir").read_text()) / "reports" / name)
    for path in paths:
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, (json.dumps(job, indent=1) + "\n").encode())
            return path
    return None
