"""The journal of a run: one short line for each window, from which it can be replayed and compared.

`Journal` of `trainkit.callbacks` writes `<output_dir>/journal.txt`, and `Checkpoint` brings it
along. A line of JSON says how the run was started, again after each resume; every other line is a
window: update, windows skipped, epoch, first sample, the one after the last, loss, norm of the
gradients (`-` where nothing clips), and for a skipped one why.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.basics.run_files import MALFORMED, json_object, lines, lines_from_end, parsed
from trainkit.errors import ConfigError

__all__ = ["JOURNAL", "VERSION", "Journal", "Record", "cut", "digest", "is_of", "read"]

JOURNAL = "journal.txt"
VERSION = 1
_HUGE = 1e19


@dataclass(frozen=True, slots=True)
class Record:
    """What one window did."""

    step: int
    """Updates applied, that of this window included."""
    skipped: int
    """Windows that were skipped, this one included."""
    epoch: int
    """Of its samples, counted from 0."""
    first: int
    """Position of its first sample in the order of the epoch, all processes together."""
    stop: int
    """Position after its last sample. With the epoch it says what every process saw."""
    loss: float
    """Mean loss of process 0, to the last bit."""
    grad_norm: float | None
    """Norm of the gradients before clipping, to the last bit, of several optimizers over all; None
    where nothing clips."""
    skip: str | None
    """Why no update was applied; None where one was."""

    @property
    def attempt(self) -> int:
        """Number of the window, from 1 on, skipped ones counted too."""
        return self.step + self.skipped

    @property
    def is_bad(self) -> bool:
        """Whether loss or norm is not finite, or so large that in fp32 its square is not."""
        return not (abs(self.loss) < _HUGE and (self.grad_norm or 0.0) < _HUGE)

    def line(self) -> str:
        """Return it as it is written; numbers are read back to the last bit."""
        norm = "-" if self.grad_norm is None else repr(self.grad_norm)
        position = f"{self.step} {self.skipped} {self.epoch} {self.first} {self.stop}"
        skip = "" if self.skip is None else " " + " ".join(self.skip.split())
        return f"{position} {self.loss!r} {norm}{skip}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """What a journal says."""

    path: Path
    headers: Sequence[Mapping[str, Any]]
    """How each start of the run was made: `command`, `folder`, `files`, `versions`, `config`, ...;
    `after` is the number of windows before it."""
    records: Sequence[Record] = field(repr=False)
    """The windows that the run is made of, in order; what a resume made anew is there once."""

    @property
    def header(self) -> Mapping[str, Any]:
        """How the run was started last."""
        return self.headers[-1]

    def header_of(self, record: Record) -> Mapping[str, Any]:
        """Return how the process was started that made this window."""
        before = [each for each in self.headers if each["after"] < record.attempt]
        return (before or self.headers)[-1]

    def record_of(self, step: int) -> Record | None:
        """Return the window that made an update, None where it is not there."""
        return next((r for r in self.records if r.step == step and r.skip is None), None)

    def check_reached(self, step: int) -> None:
        """Raise unless the run came to a step, which may have ended it."""
        last = self.records[-1].step if self.records else None
        if last is None or not 0 < step <= last + 1:
            reached = "before its first step" if last is None else f"with step {last}"
            run = self.path.parent
            raise ConfigError(
                f"`step` is {step}, but the journal of `{run}` counts from 1 and ends {reached}."
            )


def read(run: str | os.PathLike[str]) -> Journal:
    """Read the journal in a run's directory; a run may be under way.

    A line that is none of a journal is left out, with a warning that names the first.
    """
    path = Path(run) / JOURNAL
    if not path.is_file():
        raise ConfigError(
            f"`{run}` holds no journal. Pass the `output_dir` of a run that was trained with "
            "`Checkpoint(...)` or `Journal()` among its callbacks."
        )
    headers: list[Mapping[str, Any]] = []
    records: list[Record] = []
    for found in parsed(path, _entry):
        if isinstance(found, Record):
            records.append(found)
        elif found is not None:
            headers.append(found)
    if not headers:
        raise ConfigError(f"`{path}` does not say how the run was started. Pass another run.")
    return Journal(path=path, headers=headers, records=records)


_GROUPS = ("files", "hparams", "modules", "config", "run", "optimizer", "versions", "started")
_HEADER = {"run_id": str, "after": int, "start": dict, **dict.fromkeys(_GROUPS, dict)}
_START = {"folder": str, "launched": bool, "threads": int}
_RUN = {"processes": int, "device": str, "strategy": str, "precision": str}


def _entry(line: bytes) -> Mapping[str, Any] | Record:
    """Return what a line says; an error of Python: it is no line of a journal."""
    return _header(line) if line.startswith(b"{") else _record(line)


def _header(line: bytes) -> Mapping[str, Any]:
    found = json_object(line)
    if found.get("journal") != VERSION:
        raise ValueError("of another version")
    for values, kinds in ((found, _HEADER), (found["start"], _START), (found["run"], _RUN)):
        for name, kind in kinds.items():
            if type(values[name]) is not kind:
                raise ValueError(f"`{name}` is no {kind.__name__}")
    start, digests = found["start"], found["files"].values()
    words = [start["folder"], *start.get("command", ()), *digests]
    if "\0" in "".join(words) or type(start.get("command", [])) is not list:
        raise ValueError("`start` is no command")
    return found


def _record(line: bytes) -> Record:
    parts = line.decode(errors="replace").split(" ", 7)
    if len(parts) < 7:
        raise ValueError("no window")
    loss, norm = float(parts[5]), None if parts[6] == "-" else float(parts[6])
    step, skipped, epoch, first, stop = map(int, parts[:5])
    if min(step, skipped, epoch, first, stop) < 0:
        raise ValueError("a negative count")
    skip = parts[7] if len(parts) > 7 else None
    return Record(step, skipped, epoch, first, stop, loss, norm, skip)


def is_of(path: Path, run_id: str) -> bool:
    """Return whether there is a journal, and a run of this name began it."""
    try:
        return bool(_header(next(lines(path), b""))["run_id"] == run_id)
    except (OSError, *MALFORMED):
        return False


def cut(path: Path, attempts: int) -> None:
    """Take away what was written after so many windows, and half a line at the end."""
    end = 0
    for start, line in lines_from_end(path):
        with suppress(*MALFORMED):
            if _record(line).attempt <= attempts:
                end = start + len(line) + 1
                break
    os.truncate(path, end)


def digest(path: Path) -> str:
    """Return what tells a file of code from others."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
