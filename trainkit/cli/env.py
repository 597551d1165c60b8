"""`trainkit env`: what a report of a bug needs, also where torch cannot be imported."""

import argparse
import json
import os
import platform
import re
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkit.basics.formatting import readable_size
from trainkit.basics.host import machine_memory
from trainkit.errors import TrainkitError
from trainkit.launch import config_file
from trainkit.launch.machine import (
    COLLECTIVE_PACKAGES,
    DRIVER_WORDS,
    core_count,
    gpu_count,
    gpu_names,
    torch_builds,
)

_PACKAGES = (
    "trainkit", "torch", "numpy", "safetensors", "transformers", "accelerate", "evaluate",
    "datasets", "torchmetrics", "tensorboard", "xxhash",
)  # fmt: skip
_VARIABLES = re.compile(
    rf"(TRAINKIT|ACCELERATE|{DRIVER_WORDS}|GLOO|OMP|MKL|PET|PMI|OMPI_COMM_WORLD"
    r"|SLURM_(JOB_ID|NNODES|NTASKS|PROCID|LOCALID|NODEID|STEP))(_.*)?"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PYTHONPATH"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$")


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser("env", description="Print what a report of a bug needs.")
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help="the job's file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    facts = _facts(options.config_file)
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, values in facts.items():
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0


def _facts(given: str | None) -> dict[str, dict[str, Any]]:
    return {
        "system": {
            "platform": _platform(),
            "python": f"{platform.python_version()} ({sys.executable})",
            "cores": core_count(),
            "memory": _memory(),
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch": _torch_build(),
        "gpus": _gpus(),
        "variables": {
            name: "(hidden)" if _SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if _VARIABLES.fullmatch(name)
        },
        "configuration": _configuration(given),
    }


def _platform() -> str:
    """Return the kernel and the distribution; `platform.platform()` would start `uname`."""
    kernel = " ".join((platform.system(), platform.release(), platform.machine()))
    with suppress(OSError):
        kernel += f" ({platform.freedesktop_os_release()['PRETTY_NAME']})"
    return kernel


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    size = machine_memory("SC_PHYS_PAGES")
    return "unknown" if size is None else readable_size(size)


def _torch_build() -> dict[str, str]:
    """Return what torch was built for, and the packages that it moves tensors with."""
    builds = torch_builds()
    if not builds:
        return {"build": "not installed" if builds is None else "unknown"}
    libraries = {
        name: version
        for package in metadata.distributions()
        if (name := str(package.name)).startswith(COLLECTIVE_PACKAGES)
        if (version := package.version)
    }
    return {**builds, **libraries}


def _gpus() -> dict[str, Any]:
    driver = Path("/proc/driver/nvidia/version")
    facts: dict[str, Any] = {}
    try:
        facts["visible"] = gpu_count()
    except Exception as error:  # a torch that cannot be imported is what is to be reported
        facts["visible"] = f"unknown: {error}"
    facts |= {f"GPU {index}": name for index, name in enumerate(gpu_names())}
    if driver.exists():
        facts["driver"] = driver.read_text(errors="replace").splitlines()[0]
    return facts


def _configuration(given: str | None) -> dict[str, Any]:
    path = config_file.find(given)
    if path is None:
        return {"file": f"none (looked at {config_file.default_path()})"}
    try:
        file = config_file.read(path)
    except TrainkitError as error:
        return {"file": str(path), "error": str(error)}
    return {"file": str(path), **file.values, **file.variables}
