"""What this machine has, found without importing torch."""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["core_count", "free_port", "gpu_count", "gpu_names", "port_is_free"]


def core_count() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count(env: Mapping[str, str] = os.environ) -> int:
    """Return how many NVIDIA GPUs processes of this machine would see."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    present = sum(
        1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)
    )
    if visible is None:
        return present
    names = [name.strip() for name in visible.split(",")]
    # CUDA stops at the first one that is none, such as -1.
    valid = next((i for i, name in enumerate(names) if not name or name == "-1"), len(names))
    return min(valid, present)


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
