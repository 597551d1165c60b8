"""Takes away what Windows has not, in every process that has this folder on its `PYTHONPATH`.

Left are names that Python's own library needs on Linux, such as `signal.SIGKILL`:
`tests/test_other_systems.py` finds those by reading.
"""

import asyncio  # noqa: F401 - of this system; Python 3.13 has another one on Windows
import multiprocessing
import os
import signal
import sys
from typing import Any

_system: Any = os
_open = os.open

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # type: ignore[assignment]
for functions in (os.supports_dir_fd, os.supports_fd):
    functions.clear()
for name in ("fwalk", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
    delattr(os, name)

import shutil  # noqa: E402, F401 - as Windows has it: without open folders

for name in (
    "fork", "forkpty", "getpgid", "getuid", "killpg", "pidfd_open", "posix_fadvise", "pread",
    "preadv", "pwrite", "sched_getaffinity", "setsid", "sysconf",
):  # fmt: skip
    delattr(os, name)
for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "pthread_sigmask"):
    delattr(signal, name)


def _open_no_folder(path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
    if dir_fd is not None:
        raise NotImplementedError("dir_fd unavailable on this platform")
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return _open(path, flags, mode)


_system.open = _open_no_folder
multiprocessing.set_start_method("spawn")
