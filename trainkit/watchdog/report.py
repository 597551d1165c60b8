"""What a failed process leaves behind: who, where, why, in words and as JSON (rule 32)."""

import json
import os
import re
import resource
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trainkit.errors import text_of
from trainkit.formatting import readable_size

__all__ = [
    "FOLDER_VARIABLE",
    "Report",
    "first_of",
    "folder_for",
    "hint_for",
    "memory",
    "read_all",
    "tells_of_lost_peer",
]

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
        reporter: The process that writes.
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
    found: list[tuple[Path, Report]] = []
    known = {entry.name for entry in fields(Report)}
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            data = json.loads(path.read_text(encoding="utf-8"))
            found.append((path, Report(**{k: v for k, v in data.items() if k in known})))
    return sorted(found, key=lambda entry: entry[1].time)


def first_of(reports: list[tuple[Path, Report]]) -> tuple[Path, Report] | None:
    """Return the report that tells the cause: the earliest that does not point at another one."""
    ordered = sorted(reports, key=lambda entry: (entry[1].secondary, entry[1].time))
    return ordered[0] if ordered else None


def error_parts(error: BaseException) -> dict[str, str]:
    """Return the type, message and traceback of an error, with its notes."""
    return {
        "type": type(error).__name__,
        "message": text_of(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def memory() -> dict[str, int]:
    """Return what is known of the memory of this process and machine, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"highest": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        found = {"resident": pages * os.sysconf("SC_PAGE_SIZE")} | found
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        found["address space limit"] = soft
    with suppress(OSError, ValueError):
        found["limit of the container"] = int(Path("/sys/fs/cgroup/memory.max").read_text())
    with suppress(OSError, ValueError, AttributeError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found["available"] = int(match[1]) * 1024  # type: ignore[index]
    return found


def kernel_kills() -> int | None:
    """Return how many processes of this container the kernel has killed for want of memory."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/sys/fs/cgroup/memory.events").read_text()
        return int(text.split("oom_kill ")[1].split()[0])
    return None


_MEMORY = "Out of memory: use smaller batches and more accumulation, bf16, or fewer workers."
# What stands in an error's class or text, and what usually causes it.
_HINTS = (
    (r"worker .*(Bus error|SIGBUS)|shared memory", "The shared memory of this machine is full: "
     "enlarge it (`--shm-size` of a container), or use fewer or smaller prefetched batches."),
    (r"worker .*(Killed|SIGKILL)", "Usually the kernel's out-of-memory killer: use fewer workers "
     "or a smaller `prefetch_factor`, or read data without copying it into each worker."),
    (r"worker .*(Segmentation fault|SIGSEGV|exited unexpectedly|ended by itself)", "Set "
     "`num_workers=0` to see the worker's own error."),
    (r"MemoryError|out of memory|(can't|cannot|not enough) (allocate )?memory", _MEMORY),
    (r"Expected more than 1 value per channel", "BatchNorm has no spread in the last "
     "micro-batch of 1 sample: `DataLoader(drop_last=True)`, or another batch size."),
    (r"No space left", "The disk is full. Checkpoints that were committed before are intact."),
    (r"device-side assert", "Usually a label or index out of range: run once on the CPU, or with "
     "`CUDA_LAUNCH_BLOCKING=1`."),
    (r"not currently implemented for the MPS device", "Set `PYTORCH_ENABLE_MPS_FALLBACK=1` before "
     "Python starts: what this device lacks then runs on the CPU, slowly."),
    (r"[Ee]xpected all tensors to be on the same device", "Batch, model and `loss_fn` come to the "
     "device: make others there (`device=inputs.device`), and those of modules as buffers. What a "
     "`load_state_dict` of your own gets from a checkpoint is on the CPU: move it there."),
    (r"mixed torch.Tensor and DTensor", "Sharded parameters are whole only in the model's forward: "
     "a penalty on weights belongs there, or into the optimizer."),
    (r"DDP expects same model across all ranks", "Some parameters are frozen on some processes "
     "only: freeze and thaw the same ones on all."),
    (r"'_FixedLayout' object has no attribute", "On several processes this is DDP around your "
     "model: call it as a whole, and let its `forward` call the parts."),
    (r"(MPS|device).*float64", "This device has no float64: make the model and its inputs "
     "float32 (`.float()`), or train with `device=\"cpu\"`."),
)  # fmt: skip


# The same for what collectives raise. Other code times out, too, and loses other connections.
_COLLECTIVE = re.compile(r"gloo|[a-z]ccl|c10d|TCPStore|\bDist\w*Error|collectives", re.IGNORECASE)
_HINTS_OF_COLLECTIVES = (
    (r"closed by peer|reset by peer|Broken pipe|Connection refused|remote process exited|"
     r"Connection closed|[a-z]cclRemoteError", "The connection to another process broke, and none "
     "has said why: see the output of the others."),
    (r"[Mm]ismatch between collectives|invalid tensor size|preamble|enforce",
     "Processes called different collectives, or the same one with tensors "
     "of different shapes or types. `TRAINKIT_DEBUG=1` names who had what."),
    (r"[Tt]imed out", "Another process did not come to this collective, or is slow."),
)  # fmt: skip


def hint_for(kind: str, text: str, *, alone: bool = False) -> str:
    """Return the usual cause of an error and what to do, empty where none is known.

    Args:
        kind: The name of its class.
        text: Its message.
        alone: There are no other processes.
    """
    whole = f"{kind}: {text}"
    hints: tuple[tuple[str, str], ...] = _HINTS
    if not alone and _COLLECTIVE.search(whole):
        hints = (*_HINTS_OF_COLLECTIVES, *_HINTS)
    return next((hint for pattern, hint in hints if re.search(pattern, whole)), "")


def tells_of_lost_peer(error: BaseException) -> bool:
    """Return whether a collective raised an error because another process is not there any more."""
    whole = f"{type(error).__name__}: {text_of(error)}"
    broken, _ = _HINTS_OF_COLLECTIVES[0]
    of_collective = isinstance(error, RuntimeError) and _COLLECTIVE.search(whole)
    return bool(of_collective and re.search(broken, whole))
