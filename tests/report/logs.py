"""Logs of runs that never ran, for what is slow or rare in real ones."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Lines = Iterable[Mapping[str, Any]]


def event(kind: str, step: int, seconds: Mapping[str, float], **more: Any) -> dict[str, Any]:
    counters = {"step": step, "epoch": 0, "samples": 4 * step, "skipped_steps": 0}
    return {"kind": kind, **counters, "seconds": dict(seconds), **more}


def line(step: int, **figures: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "samples": 4 * step, "kind": "train", **figures}


def write_run(folder: Path, lines: Lines = (), events: Lines = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, entries in (("metrics.jsonl", lines), ("metrics.events.jsonl", events)):
        (folder / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return folder
