"""What a failed process leaves behind: who, where, why, in words and as JSON (rule 32)."""

import json
import os
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainkit.basics.formatting import readable_size
from trainkit.basics.host import process_memory
from trainkit.errors import text_of
from trainkit.watch.hints import hint_for, tells_of_lost_peer

FOLDER_VARIABLE = "TRAINKIT_REPORT_DIR"
"""Environment variable with the folder for the reports of a job."""

_SHOWN_INDICES = 32
_SHOWN_LINES = 12  # of the stack of the process that holds the others up


@dataclass(frozen=True, kw_only=True)
class Report:
    """Why a job failed, as one process saw it.

    Args:
        kind: "error": it raised. "lost": `process` ended without a word. "stalled": the watchdog
            ended the job. "left": it left because of another process.
        secondary: Whether the cause is told by another report.
        process: The process that failed; None where that is not known.
        cause: What happened, in one sentence.
        hint: What usually causes it, and what to do.
        place: Where the run was: `step`, `epoch`, `phase`, `samples`.
        error: `type`, `message` and `traceback` of what was raised.
        memory: Of this process and machine, in bytes.
        states: Where every process was, by process, after a stall.
    """

    kind: str
    cause: str
    process: int | None
    processes: int
    reporter: int
    secondary: bool = False
    hint: str = ""
    place: dict[str, Any] = field(default_factory=dict)
    error: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)

    def write(self, folder: Path) -> Path:
        """Write the report as JSON into `folder`; the file appears whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self.time))
        path = folder / f"{stamp}-process-{self.reporter}-{self.kind}-{self.pid}.json"
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        scratch.replace(path)
        return path

    def headline(self) -> str:
        """Return who, where and what in one line."""
        who = f"process {self.reporter} of {self.processes} (pid {self.pid} on {self.host})"
        if self.kind in ("lost", "stalled"):
            return f"{self.cause} (seen by {who}{self._where()})"
        return f"{who}{self._where()}: {self.cause}"

    def describe(self) -> str:
        """Return everything in words, over several lines."""
        parts = [f"trainkit: {self.headline()}"]
        if self.error:
            parts.append(self.error["traceback"].rstrip())
        if indices := (self.place.get("samples") or {}).get("indices"):
            more = ", ..." if len(indices) > _SHOWN_INDICES else ""
            shown = ", ".join(map(str, indices[:_SHOWN_INDICES]))
            parts.append(f"samples of the window, by index in the data set: {shown}{more}")
        for rank, state in self.states.items():
            parts.append(f"  process {rank}: {state.get('text')}")
            if rank == str(self.process):
                stack = str(state.get("stack", "")).rstrip().splitlines()
                parts += [f"    {line}" for line in stack[-_SHOWN_LINES:]]
        if self.memory:
            parts.append(
                "memory: " + ", ".join(f"{k} {readable_size(v)}" for k, v in self.memory.items())
            )
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n".join(parts)

    def _where(self) -> str:
        place = self.place
        if not place:
            return ""
        samples = place.get("samples") or {}
        first, last = samples.get("first"), samples.get("last")
        window = f", samples {first} to {last} of the epoch" if first is not None else ""
        return (
            f", epoch {place.get('epoch')}, after step {place.get('step')}, phase "
            f"{place.get('phase')}{window}"
        )


def folder_for(output_dir: Path | None) -> Path | None:
    """Return where reports go: what the launcher says, else beside the run's files, else None."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    return None if output_dir is None else output_dir / "reports"


def read_all(folder: Path) -> list[tuple[Path, Report]]:
    """Return the reports in a folder, the earliest first; what is no report is left out."""
    by_path: list[tuple[Path, Report]] = []
    known = {entry.name for entry in fields(Report)}
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            data = json.loads(path.read_text(encoding="utf-8"))
            by_path.append((path, Report(**{k: v for k, v in data.items() if k in known})))
    return sorted(by_path, key=lambda entry: entry[1].time)


def first_of(reports: list[tuple[Path, Report]]) -> tuple[Path, Report] | None:
    """Return the report that tells the cause: the earliest that does not point at another one."""
    ordered = sorted(reports, key=lambda entry: (entry[1].secondary, entry[1].time))
    return ordered[0] if ordered else None


def of_error(error: BaseException, rank: int, size: int, place: dict[str, Any]) -> Report:
    """Return the report of process `rank` of `size` on an error that it has raised at `place`."""
    name, text = type(error).__name__, text_of(error)
    first, *more = text.strip().split("\n")
    if first.endswith(":"):  # of a list
        first += " " + "; ".join(line.strip(" -") for line in more)
    origin = getattr(error, "origin", None)  # the process that an error of all came from
    return Report(
        kind="error",
        cause=f"{name}: {first}" if first else name,
        process=rank if origin is None else origin,
        processes=size,
        reporter=rank,
        secondary=tells_of_lost_peer(error) or origin is not None,
        hint=hint_for(name, text, alone=size == 1),
        place=place,
        error={
            "type": name,
            "message": text,
            "traceback": "".join(traceback.format_exception(error)),
        },
        memory=process_memory(),
    )
