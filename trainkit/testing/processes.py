"""Run a function on several real processes of this machine and collect what each returns."""

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import torch

from trainkit.containers.wire_format import decode, encode
from trainkit.distributed.rendezvous import INIT_METHOD

_torch: Any = torch.multiprocessing
_FAILURES = (_torch.ProcessRaisedException, _torch.ProcessExitedException)
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
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        results = [Path(folder) / f"result-{rank}" for rank in range(size)]
        everybody = multiprocessing.get_context("fork").Barrier(size)
        with warnings.catch_warnings():
            # Python warns of threads at a fork; a child uses none of its parent's.
            warnings.simplefilter("ignore", DeprecationWarning)
            children: Any = _torch.start_processes(
                _be_process, (results, everybody, function, args), size, False, start_method="fork"
            )
        grace = 0.0
        try:
            while not children.join(timeout=0.05, grace_period=_GRACE_SECONDS):
                if all(result.exists() for result in results):
                    grace = _GRACE_SECONDS  # a thread that was left running may hold up the end
                    break
                if time.monotonic() >= deadline:
                    raise ProcessFailed("Processes were still running when the time was up.")
            return [decode(result.read_bytes()) for result in results]
        except FileNotFoundError:
            raise ProcessFailed("A process ended without a result, as by `sys.exit`.") from None
        except _FAILURES as error:
            raise ProcessFailed(f"{error}") from None
        finally:
            for process in children.processes:
                process.join(grace)
                process.kill()
                process.join()


def _be_process(
    rank: int,
    results: list[Path],
    everybody: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Be one of the processes, until all are done: others may still connect to this one."""
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(results)),
            "LOCAL_WORLD_SIZE": str(len(results)),
            INIT_METHOD: f"file://{results[0].parent}/rendezvous",
        }
    )
    torch.set_num_threads(1)
    try:
        content = encode(function(rank, *args))
    except BaseException:
        everybody.abort()
        raise
    part = results[rank].with_suffix(".part")
    part.write_bytes(content)
    part.rename(results[rank])
    with suppress(BrokenBarrierError):
        everybody.wait()
