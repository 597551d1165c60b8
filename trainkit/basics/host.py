"""What the kernel says of the memory of this process and its machine; without torch."""

import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path


def process_memory() -> dict[str, int]:
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
