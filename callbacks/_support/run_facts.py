"""What a run is made of and where it was started, as plain values for logs and reports."""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkit.basics.formatting import json_value
from trainkit.training.facts import parameter_counts
from trainkit.training.run import Run
from trainkit.training.several.optimizers import described
from trainkit.types import class_name

_PACKAGES = ("trainkit", "torch", "numpy", "transformers")
_SECRET = re.compile(
    r"token|secret|passw(or)?d|credential|auth|api_?key|(^|[._-])key\b", re.IGNORECASE
)


def run_facts(run: Run) -> dict[str, Any]:
    """Return what tells this run from others, in groups of plain values by name."""
    try:
        folder = Path(sys.argv[0] or ".").resolve().parent
    except FileNotFoundError:  # the working directory is gone
        folder = Path(os.sep)
    return {
        "config": asdict(run.config),
        "run": _parts_of(run),
        "optimizer": json_value(run.optimizer.defaults),
        "versions": {"python": platform.python_version(), **_versions()},
        "started": {
            "command": hide_secrets([Path(sys.executable).name, *sys.orig_argv[1:]]),
            "commit": commit_of(folder),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        },
    }


def _parts_of(run: Run) -> dict[str, Any]:
    loader, schedule = run.train_loader, run.lr_schedule
    total, trainable = parameter_counts(run.module)
    combination = loader.combination(run.config.gradient_accumulation_steps)
    return {
        "model": class_name(run.module),
        "parameters": total,
        "trainable parameters": trainable,
        "optimizer": described(run.optimizer),
        "lr scheduler": None if schedule is None else schedule.name,
        "strategy": run.strategy.name,
        "precision": run.precision.name,
        "processes": run.processes.num_processes,
        "device": str(run.strategy.device),
        "batch size of one process": loader.batch_size,
        "window": loader.nominal_window(run.config.gradient_accumulation_steps),
        "samples per epoch": loader.samples_per_epoch,
        "planned steps": run.planned_steps,
    } | ({"training loaders": combination} if combination else {})


@cache
def _versions() -> Mapping[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def hide_secrets(command: Sequence[str]) -> str:
    """Return a command line as text, without the values of options named like a secret."""
    return " ".join(hidden_words(command))


def hidden_words(command: Sequence[str]) -> list[str]:
    """Return the words of a command line, `(hidden)` for those values."""
    shown: list[str] = []
    hides = False
    for word in command:
        name, equals, _ = word.partition("=")
        is_secret = (word.startswith("-") or bool(equals)) and bool(_SECRET.search(name))
        if hides and not word.startswith("--"):
            shown.append("(hidden)")
        else:
            shown.append(f"{name}=(hidden)" if is_secret and equals else word)
        hides = is_secret and not equals
    return shown


def commit_of(folder: Path) -> str | None:
    """Return the commit that is checked out where `folder` is, None outside of a repository."""
    for parent in (folder, *folder.parents):
        entry = parent / ".git"
        try:
            if entry.is_file():  # a work tree or a submodule, which says where its files are
                entry = parent / entry.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
            if (entry / "HEAD").is_file():
                return _head(entry)
        except (OSError, UnicodeDecodeError):
            return None
    return None


def _head(repository: Path) -> str | None:
    head = (repository / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref:"):
        return head
    name = head.removeprefix("ref:").strip()
    shared = repository / "commondir"
    common = repository / shared.read_text(encoding="utf-8").strip() if shared.exists() else None
    for directory in (repository, *([common] if common else [])):
        if (directory / name).is_file():
            return (directory / name).read_text(encoding="utf-8").strip()
        packed = directory / "packed-refs"
        for line in packed.read_text(encoding="utf-8").splitlines() if packed.exists() else ():
            if line.endswith(f" {name}"):
                return line.split()[0]
    return None
