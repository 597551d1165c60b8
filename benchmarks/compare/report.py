"""The results as JSON, with the machine and the versions that they were made on."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare.rows import Row
from benchmarks.compare.table import summary
from benchmarks.compare.workload import Workload

__all__ = ["machine", "write", "write_markdown"]


def machine(versions: Mapping[str, str | None], clock: str) -> dict[str, Any]:
    """Return what a reader must know to judge the times."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "clock": clock,
        "versions": {name: version for name, version in versions.items() if name != "raw"},
    }


def write(
    path: Path,
    facts: Mapping[str, Any],
    rounds: int,
    workloads: Sequence[Workload],
    rows: Sequence[Row],
) -> None:
    """Write everything that was measured."""
    settings = {
        workload.name: asdict(workload) | {"kind": workload.kind, "unit": workload.unit}
        for workload in workloads
    }
    results = [
        asdict(row)
        | ({"time": row.time, "ratio": row.ratio} if row.is_measured and row.ratios else {})
        | {"is_wrong": row.is_wrong}
        for row in rows
    ]
    content = {"machine": facts, "rounds": rounds, "workloads": settings, "results": results}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_markdown(path: Path, facts: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write the ratios as a table for a README."""
    versions = [f"{name} {version}" for name, version in facts["versions"].items() if version]
    lines = [
        f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} thread; Python "
        f"{facts['python']}, torch {facts['torch']}, {', '.join(versions)}.",
        "",
    ]
    for number, cells in enumerate(summary(rows)):
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            lines.append(f"|---{'|---:' * (len(cells) - 1)}|")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
