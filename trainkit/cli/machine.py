"""What this machine has, found without importing torch."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "BUILDS",
    "COLLECTIVE_PACKAGES",
    "DRIVER_WORDS",
    "INTERFACE_VARIABLES",
    "core_count",
    "free_port",
    "gpu_count",
    "gpu_names",
    "gpu_variable",
    "port_is_free",
]

BUILDS = "cuda|hip|xpu"
"""What torch's `version.py` may say that it was built for."""

COLLECTIVE_PACKAGES = ("nvidia-nccl", "oneccl")
"""How packages with collectives of accelerators begin."""

DRIVER_WORDS = "TORCH|PYTORCH|CUDA|NCCL|HIP|ROCR|HCCL|ASCEND|ZE"
"""How environment variables of torch and of accelerators begin."""

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""What tells torch's back ends their interface, and what stands before it: "=" is no prefix."""

# Of each driver: what its devices are called, and the variable that says which a process sees.
_DRIVERS = ((r"nvidia\d+", "CUDA_VISIBLE_DEVICES"), (r"davinci\d+", "ASCEND_RT_VISIBLE_DEVICES"))


def core_count() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count(env: Mapping[str, str] = os.environ) -> int:
    """Return how many accelerators processes of this machine would see, as drivers tell it.

    Those of NVIDIA, Ascend and Apple; of others only torch knows.
    """
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return 1
    present = max(map(_present, (pattern for pattern, _ in _DRIVERS)))
    visible = env.get(gpu_variable())
    if visible is None:
        return present
    names = [name.strip() for name in visible.split(",")]
    # CUDA stops at the first one that is none, such as -1.
    valid = next((i for i, name in enumerate(names) if not name or name == "-1"), len(names))
    return min(valid, present)


def gpu_variable() -> str:
    """Return the environment variable that says which accelerators a process sees."""
    return max(_DRIVERS, key=lambda driver: _present(driver[0]))[1]


def _present(pattern: str) -> int:
    return sum(1 for path in Path("/dev").glob("*") if re.fullmatch(pattern, path.name))


def gpu_names() -> list[str]:
    """Return the models of the NVIDIA GPUs that the driver lists."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        found.append(model.group(1) if model else "unknown")
    return found


def port_is_free(port: int) -> bool:
    """Return whether a server of this machine could listen on a TCP port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a TCP port that no server of this machine listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
