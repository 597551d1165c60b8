"""Run a function on several real processes of this machine and collect what each returns."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from trainkit.distributed import Processes

GRACE_SECONDS = 20.0  # given to the others after one rank has failed

_TIMED_OUT = "still running when the time was up"


class RanksError(AssertionError):
    """Ranks that raised, died or did not end in time.

    Args:
        message: What happened, with the traceback of every rank that has one.
        failures: Rank to the text of what happened on it.
    """

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(eq=False)
class _Child:
    rank: int
    process: BaseProcess
    connection: Connection
    stack_file: Path
    result: Any = None
    failure: str | None = None
    done: bool = False


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 240.0, **kwargs: Any
) -> list[Any]:
    """Call `function(rank, *args, **kwargs)` on `size` forked processes; return all results.

    The processes have the environment that torchrun would set, one thread each, and a `file://`
    rendezvous in a temporary folder. Results travel by pickle, tensors as copies.

    Args:
        size: Number of processes; with 1 the function runs in a child all the same.
        timeout: Seconds until all that still run are killed, with everything they started.

    Raises:
        RanksError: A rank raised, died or did not end in time; holds all tracebacks.
    """
    if torch.distributed.is_initialized():
        raise RuntimeError("This process has a process group; forking it would share its sockets.")
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        children: list[_Child] = []
        try:
            children.extend(
                _start(rank, size, Path(folder), function, args, kwargs) for rank in range(size)
            )
            _collect(children, time.monotonic() + timeout)
        finally:
            for child in children:
                _end(child)
    failures = {child.rank: child.failure for child in children if child.failure is not None}
    if failures:
        texts = [f"---- rank {rank} of {size}: {text}" for rank, text in failures.items()]
        raise RanksError("\n" + "\n".join(texts), failures)
    return [child.result for child in children]


def in_turn(rank: int, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call `function(rank, *case)` for each case, all in one job; return the results."""
    results = []
    for case in cases:
        try:
            results.append(function(rank, *case))
        except BaseException as error:
            error.add_note(f"The case: {case}")
            raise
    return results


def _start(
    rank: int,
    size: int,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Child:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    stack_file = folder / f"stack-{rank}"
    process = context.Process(
        target=_main,
        args=(rank, size, folder, theirs, stack_file, function, args, kwargs),
        name=f"rank {rank}",
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at a fork; ours are idle and one thread is used after it.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    assert process.pid is not None
    with suppress(OSError):
        os.setpgid(process.pid, process.pid)  # the child does so too; whoever comes first
    return _Child(rank, process, ours, stack_file)


def _main(
    rank: int,
    size: int,
    folder: Path,
    connection: Connection,
    stack_file: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Be one rank; never returns."""
    with suppress(OSError):
        os.setpgid(0, 0)
    code = 0
    try:
        faulthandler.register(signal.SIGQUIT, file=stack_file.open("w"), all_threads=True)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            TRAINKIT_INIT_METHOD=f"file://{folder}/rendezvous",
        )
        torch.set_num_threads(1)
        message = pickle.dumps((True, function(rank, *args, **kwargs)))
    except BaseException:
        code = 1
        message = pickle.dumps((False, traceback.format_exc()))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(message)
        if code == 0:
            connection.recv_bytes()  # stay until all are done: others may still connect to us
            if Processes._live is not None and Processes._live.watch is not None:
                Processes._live.watch.close()  # else the others would miss this one
    finally:
        # No clean-up of inherited state: it belongs to the parent.
        os._exit(code)


def _collect(children: list[_Child], deadline: float) -> None:
    """Wait for every child's message until `deadline`, or a little after the first failure."""
    waiting = list(children)
    while waiting:
        connections = [child.connection for child in waiting]
        ready = wait(connections, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for child in [child for child in waiting if child.connection in ready]:
            waiting.remove(child)
            _receive(child)
            if child.failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for child in waiting:
        child.failure = f"{_TIMED_OUT}\n{_stack(child)}"


def _receive(child: _Child) -> None:
    try:
        succeeded, value = pickle.loads(child.connection.recv_bytes())
    except EOFError:
        child.process.join(GRACE_SECONDS)
        child.failure = f"died without a word, exit code {child.process.exitcode}"
        return
    child.done = True
    if succeeded:
        child.result = value
    else:
        child.failure = f"raised\n{value}"


def _stack(child: _Child) -> str:
    """Return where a child that does not end is now."""
    assert child.process.pid is not None
    with suppress(ProcessLookupError):
        os.kill(child.process.pid, signal.SIGQUIT)
    end = time.monotonic() + GRACE_SECONDS
    text = ""
    while not text and time.monotonic() < end:
        time.sleep(0.02)
        text = child.stack_file.read_text() if child.stack_file.exists() else ""
    return text


def _end(child: _Child) -> None:
    """Kill a child and everything that it started, and reap it."""
    assert child.process.pid is not None
    if child.done:
        with suppress(OSError):
            child.connection.send_bytes(b"leave")
        child.process.join(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.join()
    child.connection.close()
