"""Let nobody connect to a group of gloo but its processes, which are connected already.

gloo listens as long as a group lives, though all have come when it is made. It keeps whoever
connects, also when he has gone, and aborts the process when no descriptor is left.
"""

import ctypes
import os
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LAZY = "TORCH_GLOO_LAZY_INIT"
"""Environment variable; with 1, gloo connects two processes when they first talk to each other."""

_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # for the kernel: keep 0 bytes of whatever comes


@contextmanager
def closed_to_strangers() -> Iterator[None]:
    """Make groups of gloo inside; from the end on the kernel drops what comes for their listeners.

    A listener that is closed under gloo would make it abort at the end of the group, so they stay.
    Without effect where gloo connects later (`LAZY`), and where this process cannot see or set it.
    """
    before = {name for name, _ in _descriptors()}
    yield
    if os.environ.get(LAZY, "0") not in ("", "0"):
        return
    now = _descriptors()
    watched = {each for name, number in now if "[eventpoll]" in name for each in _watched(number)}
    for name, number in now:
        # Unlike those of Python and most libraries, gloo's are kept by a program that is executed.
        is_gloos = number in watched and os.get_inheritable(number)
        if is_gloos and name.startswith("socket:") and name not in before:
            _drop_callers(number)


def _descriptors() -> list[tuple[str, int]]:
    """Return what the descriptors of this process stand for; sockets have names of their own."""
    descriptors = []
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # that of the folder itself is gone
                descriptors.append((os.readlink(f"/proc/self/fd/{number}"), int(number)))
    return descriptors


def _watched(epoll: int) -> list[int]:
    """Return the descriptors that an epoll watches which is kept as gloo's."""
    with suppress(OSError):
        if os.get_inheritable(epoll):
            text = Path(f"/proc/self/fdinfo/{epoll}").read_text()
            return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", text, re.MULTILINE)]
    return []


def _drop_callers(number: int) -> None:
    """Let the kernel drop whatever comes for a socket, if it listens."""
    program = ctypes.create_string_buffer(_DROP)
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            told = struct.pack("HP", 1, ctypes.addressof(program))
            one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, told)
