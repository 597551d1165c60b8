"""Signals that ask a training to end: a checkpoint, then the exit (rule 33)."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from typing_extensions import override

EXIT_LATER = 75
"""Exit code after SIGUSR1 or the time limit: EX_TEMPFAIL of sysexits.h, "try again later"."""

LATER: int = getattr(signal, "SIGUSR1", 10)
"""The signal that asks to end and go on later, as the time limit does; Windows cannot send it."""

KILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""The signal that no process can ignore; on Windows it is the other one."""

CAUGHT = tuple(s for s in (signal.SIGTERM, signal.SIGINT, LATER) if s in signal.valid_signals())
"""The signals that ask a training to end."""


def exit_code(signum: int) -> int:
    """Return the code to exit with: 143 for SIGTERM, 130 for SIGINT, 75 for SIGUSR1."""
    return EXIT_LATER if signum == LATER else 128 + signum


def signal_name(signum: int) -> str:
    """Return what a signal is called."""
    return "SIGUSR1" if signum == LATER else signal.Signals(signum).name


@contextmanager
def held_back() -> Iterator[None]:
    """Hold back the signals that ask to end; processes that are forked inside inherit that."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where nothing is inherited
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore() -> None:
    """Ignore the signals that ask to end, also where they were held back until now."""
    for signum in CAUGHT:
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


class Interrupted(SystemExit):
    """Ends the program after a signal, or the time limit, once everything is saved.

    Args:
        signum: The signal.
        message: What happened and what was saved.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(exit_code(signum))
        self.signum = signum
        self.message = message

    @override
    def __str__(self) -> str:
        return self.message


class Interrupts:
    """Notes the first signal, for the loop to serve; a second one ends the process at once.

    Where somebody goes on typing, as in a notebook, a second SIGINT is a KeyboardInterrupt.

    Handlers that were there before are called too, and put back at the end. In other threads
    than the main one, where Python allows no handlers, nothing is caught.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def ask(self, signum: int) -> None:
        """Act as if the signal had come."""
        self.received = self.received or signum

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in CAUGHT:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received:
            if signum == signal.SIGINT and is_interactive():
                raise KeyboardInterrupt
            try:
                kill_workers()  # workers ignore the signal, and outlive us by seconds
            finally:
                os._exit(exit_code(signum))
        self.received = signum
        before: Callable[..., Any] | int | None = self._before.get(signum)
        if callable(before) and before is not signal.default_int_handler:
            before(signum, frame)


def kill_workers() -> None:
    """Kill the processes that must not outlive this one; those of its parent, if forked, stay."""
    for child in multiprocessing.active_children():
        if child.daemon and getattr(child, "_parent_pid", None) == os.getpid():
            child.kill()


def is_failing() -> bool:
    """Return whether the interpreter is on its way out because of an exception."""
    return hasattr(sys, "last_value")


def in_notebook() -> bool:
    """Return whether a notebook's kernel runs this code; imports nothing."""
    shell = _ipython()
    return shell is not None and "IPKernelApp" in shell.config


def is_interactive() -> bool:
    """Return whether somebody goes on typing once this code is done: nothing may end Python."""
    return _ipython() is not None or hasattr(sys, "ps1")


def _ipython() -> Any:
    """Return the shell of IPython; None also in what a notebook has forked, which cannot use it."""
    module = sys.modules.get("IPython")
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    return module.get_ipython() if module is not None and alone else None
