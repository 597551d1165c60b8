"""How a process of a job ends that cannot end by itself: a report, its workers, the exit."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.basics.signals import KILL, exit_code, kill_workers
from trainkit.watch.listening import ADDRESS_VARIABLE
from trainkit.watch.member import Member
from trainkit.watch.report import Report

EXIT_FAILED = 1
"""Exit code of a process that failed by itself, as Python's own."""
EXIT_STALLED = 70
"""Exit code of all processes after the watchdog ended the job: EX_SOFTWARE of sysexits.h."""


def say(text: str) -> None:
    """Write a line to stderr, past Python's buffers, whose lock another thread may hold."""
    with suppress(Exception):
        os.write(sys.stderr.fileno(), text.encode("utf-8", "backslashreplace") + b"\n")


def publish(report: Report, folder: Path | None) -> None:
    """Write a report into its folder and its headline on stderr; never raises.

    The rest too, unless there is a launcher that will show it.
    """
    text, path = f"trainkit: {report.headline()}", None
    try:
        path = None if folder is None else report.write(folder)
    except Exception as error:  # the failure itself is what matters
        text += f"\ntrainkit: the report could not be written: {error!r}"
    if not report.secondary and ADDRESS_VARIABLE not in os.environ:
        text = text if report.kind == "error" else report.describe()
        text += f"\nhint: {report.hint}" if report.hint and report.kind == "error" else ""
        text += f"\nreport: {path}" if path is not None else ""
    say(text)


def kill(members: Iterable[Member]) -> None:
    """End processes of this machine that cannot end by themselves."""
    frozen = list(members)
    running = [member for member in frozen if not member.is_stopped()]
    aborted = [member for member in running if member.kill(signal.SIGABRT)]
    end = time.monotonic() + 0.5
    while time.monotonic() < end and any(member.lives() for member in aborted):
        time.sleep(0.02)  # it writes its stack to its stderr
    for member in frozen:
        member.kill(KILL)


def leave(
    code: int, report: Report, folder: Path | None, last: Callable[[], None] = lambda: None
) -> None:
    """End this process at once, whatever its other threads do; the report comes first.

    Args:
        code: The exit code.
        report: Why.
        folder: Where the report goes; None: only on stderr.
        last: Called after the report.
    """
    try:
        _within(2.0, publish, report, folder)
        _within(1.0, last)
        _within(0.3, kill_workers)
        _within(0.3, _flush)
    finally:
        os._exit(code)


def end_after(error: BaseException) -> None:
    """End the process as Python does after an error that nobody caught, but surely.

    Threads of collectives under way let go of their tensors while the interpreter ends, which
    may abort it; to wait for them would be to wait for processes that do not come.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins the user's threads
    atexit._run_exitfuncs()
    kill_workers()
    with suppress(Exception):
        _flush()
    os._exit(exit_code(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else EXIT_FAILED)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _within(seconds: float, function: Callable[..., None], *args: Any) -> None:
    """Call a function that may block; wait for it at most so long."""

    def call() -> None:
        with suppress(Exception):
            function(*args)

    thread = threading.Thread(target=call, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # no memory for its stack
        call()
        return
    thread.join(seconds)
