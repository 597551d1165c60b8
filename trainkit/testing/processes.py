"""Run a function on several real processes of this machine and collect what each returns."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from trainkit.containers.wire_format import decode, encode
from trainkit.distributed.group import INIT_METHOD

__all__ = ["ProcessFailed", "on_processes"]

_GRACE_SECONDS = 5.0  # given to the others after one process has failed


class ProcessFailed(AssertionError):
    """A process raised, died or did not end in time; the message has its traceback."""


def on_processes(
    size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120.0
) -> list[Any]:
    """Call `function(rank, *args)` on `size` forked processes and return all results, by rank.

    Each process has the environment that torchrun would set, and one thread. Results travel
    without pickle, so they are made of tensors, numbers, text, lists and dictionaries.

    Args:
        size: Number of processes; with 1 the function runs in a process of its own all the same.
        function: What to run; a lambda will do.
        timeout_seconds: How long it may take, until all processes are killed.

    Raises:
        ProcessFailed: A process raised, died, or did not end in time.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "This process has a process group, whose sockets its children would share. Call "
            "`trainer.close()` first, or run the check in a process of its own."
        )
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        children: list[_Child] = []
        try:
            children.extend(_Child(rank, size, folder, function, args) for rank in range(size))
            _collect(children, time.monotonic() + timeout_seconds)
        finally:
            for child in children:
                child.end()
    failed = [child for child in children if child.failure]
    if failed:
        texts = [f"---- process {child.rank} of {size} {child.failure}" for child in failed]
        raise ProcessFailed("\n" + "\n".join(texts))
    return [child.result for child in children]


class _Child:
    """One of the processes, as its parent sees it."""

    def __init__(
        self, rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        context = multiprocessing.get_context("fork")
        self.rank = rank
        self.result: Any = None
        self.failure = ""
        self.connection, theirs = context.Pipe()
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            INIT_METHOD: f"file://{folder}/rendezvous",
        }
        self.process: BaseProcess = context.Process(
            target=_be_process, args=(theirs, environment, function, rank, args)
        )
        with warnings.catch_warnings():
            # Python warns of threads at a fork; a child uses none of its parent's.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Take over what the process sent, or that it died."""
        try:
            succeeded, value = decode(self.connection.recv_bytes())
        except EOFError:
            self.process.join(_GRACE_SECONDS)
            self.failure = f"died without a word, exit code {self.process.exitcode}"
            return
        if succeeded:
            self.result = value
        else:
            self.failure = f"raised\n{value}"

    def end(self) -> None:
        """Let the process go, with everything that it started."""
        if not self.failure:
            with suppress(OSError):
                self.connection.send_bytes(b"leave")
            self.process.join(_GRACE_SECONDS)
        assert self.process.pid is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def _be_process(
    connection: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
) -> None:
    """Be one of the processes, until the parent lets it go."""
    with suppress(OSError):
        os.setpgid(0, 0)
    try:
        os.environ.update(environment)
        torch.set_num_threads(1)
        message = encode((True, function(rank, *args)))
    except BaseException:
        message = encode((False, traceback.format_exc()))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(message)
        connection.recv_bytes()  # stay until all are done: others may still connect to this one
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone
    # `multiprocessing` now ends what this process began, such as its watch over the others, and
    # leaves what it inherited to the parent.


def _collect(children: list[_Child], deadline: float) -> None:
    """Wait for every process until `deadline`, or a little after the first failure."""
    waiting = {child.connection: child for child in children}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            child = waiting.pop(connection)
            child.receive()
            if child.failure:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for child in waiting.values():
        child.failure = "was still running when the time was up"
