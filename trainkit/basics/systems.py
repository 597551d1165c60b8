"""What Linux and macOS have and Windows has not: files, folders, forks (signals: `signals.py`).

What only Linux says (`/proc`) is asked for where it is used, and may be missing.
"""

import os
from collections.abc import Callable

from trainkit.errors import ConfigError

ITSELF: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""Flags for `os.open`: the file, not what it links to, and its bytes as they are."""

AT_ONCE: int = getattr(os, "O_NONBLOCK", 0)
"""The same: a pipe does not make its reader wait."""

IN_FOLDERS = os.open in os.supports_dir_fd
"""Whether folders can be opened, and files by their names in an open one."""


def require_fork(user: str, instead: str) -> None:
    """Raise ConfigError where this system cannot fork.

    Args:
        user: What needs it; the sentence begins with it.
        instead: What else may be done.
    """
    if not hasattr(os, "fork"):
        raise ConfigError(f"{user} forks processes, which this system cannot do. {instead}")


def after_fork(function: Callable[[], object]) -> None:
    """Have `function` called in each process that this one forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
