"""What the kernel says of the memory of this process and its machine; without torch."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]


def process_memory() -> dict[str, int]:
    """Return what is known of the memory of this process and machine, in bytes."""
    memory: dict[str, int] = {}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        memory["highest"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            memory["address space limit"] = soft
    with suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = {"resident": pages * os.sysconf("SC_PAGE_SIZE")} | memory
    with suppress(OSError, ValueError):
        memory["limit of the container"] = int(Path("/sys/fs/cgroup/memory.max").read_text())
    with suppress(OSError, ValueError, AttributeError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        memory["available"] = int(match[1]) * 1024  # type: ignore[index]
    return memory


def machine_memory(*kinds: str) -> int | None:
    """Return the bytes of memory of this machine.

    Args:
        *kinds: "SC_AVPHYS_PAGES" for what is free, "SC_PHYS_PAGES" for all; the first that the
            system tells counts. None where it tells none.
    """
    for kind in kinds:
        with suppress(AttributeError, ValueError, OSError):  # macOS tells less, Windows nothing
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf(kind)
    return None


def kernel_kills() -> int | None:
    """Return how many processes of this container the kernel has killed for want of memory."""
    with suppress(OSError, ValueError, IndexError):
        text = Path("/sys/fs/cgroup/memory.events").read_text()
        return int(text.split("oom_kill ")[1].split()[0])
    return None
