"""Start processes from a notebook."""

import codecs
import gc
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from trainkit.accelerator.arguments import chosen_precision
from trainkit.basics.device import ASK_THE_DRIVER, accelerator_count, forbids_fork
from trainkit.basics.systems import require_fork
from trainkit.distributed import Processes
from trainkit.distributed.group import SECRET
from trainkit.distributed.rendezvous import INIT_METHOD
from trainkit.distributed.watch import EXIT_OTHER_FAILED
from trainkit.errors import ConfigError, DistributedError

GRACE_SECONDS = 2.0  # for the others to end by themselves after one has failed
_OF_OTHERS: dict[str, Any] = {
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": None,
    "rdzv_id": "none",
    "max_restarts": 0,
    "monitor_interval": 0.1,
    "log_line_prefix_template": None,
}


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    **others: Any,
) -> None:
    """Run a function of a notebook on several processes of this machine, and wait for its end.

    The processes are forked, so the function sees what the notebook has defined; each computes
    with one thread. What they print appears in the cell. One process runs in the notebook itself.

    Args:
        function: What each process runs; it makes its own `Accelerator`.
        args: Its arguments.
        num_processes: On this machine; None: one for each GPU.
        mixed_precision: What `Accelerator()` takes by default: "no", "fp16", "bf16" or "fp8".
        use_port: Where the machines meet, if there are several.
        master_addr: The machine that they meet on.
        node_rank: Number of this machine.
        num_nodes: Number of machines.
        **others: Names that Accelerate has, at their defaults.

    Raises:
        ConfigError: The processes could not work.
        DistributedError: One of them raised, or ended; holds its traceback.
    """
    for name, value in others.items():
        if name not in _OF_OTHERS:
            raise ConfigError(f"`notebook_launcher` has no argument `{name}`.")
        if value != _OF_OTHERS[name]:
            raise ConfigError(
                f"`{name}={value!r}` has no effect in `notebook_launcher`, which starts its "
                "processes once. Leave it out, or use `trainkit launch`."
            )
    with variables(ASK_THE_DRIVER):
        count = max(1, accelerator_count()) if num_processes is None else num_processes
    if count < 1:
        raise ConfigError(f"`num_processes` must be at least 1, but is {count}.")
    environment = {"TRAINKIT_MIXED_PRECISION": chosen_precision(mixed_precision)}
    if count * num_nodes == 1:
        with variables(environment):
            function(*args)
        return
    _refuse_started()
    first = node_rank * count
    with tempfile.TemporaryDirectory(prefix="notebook-") as folder:
        environment |= {
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": str(use_port),
            "WORLD_SIZE": str(count * num_nodes),
            "LOCAL_WORLD_SIZE": str(count),
        }
        if num_nodes == 1:  # no port, which another program could have
            environment[INIT_METHOD] = f"file://{folder}/rendezvous"
            environment[SECRET] = secrets.token_hex(16)
        try:
            _run_forked(count, (first, function, args, environment))
        except ProcessRaisedException as error:
            trace = error.msg.partition("error:\n")[2].rstrip()
            raise DistributedError(
                f"Process {first + error.error_index} raised:\n\n{trace}"
            ) from None
        except ProcessExitedException as error:
            raise DistributedError(
                f"Process {first + error.error_index} ended without a word, exit code "
                f"{error.exit_code}."
            ) from None


def _run_forked(count: int, task: tuple[Any, ...]) -> None:
    """Run `_be_child` on forked processes, show what they print, and wait for their end."""
    pipes = [os.pipe() for _ in range(2)]
    writers = [writer for _, writer in pipes]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        context = start_processes(  # type: ignore[no-untyped-call]
            _be_child, (*task, writers), nprocs=count, join=False, start_method="fork"
        )
    finally:
        for writer in writers:
            os.close(writer)
    streams = zip(pipes, (sys.stdout, sys.stderr), strict=True)
    shows = [Thread(target=_show, args=(pipe[0], stream)) for pipe, stream in streams]
    for thread in shows:
        thread.daemon = True
        thread.start()
    followed: ProcessExitedException | None = None  # the end of one that another has ended
    try:
        while context.sentinels:
            try:
                context.join(grace_period=GRACE_SECONDS)
            except ProcessExitedException as error:  # of those that end together torch takes any
                if error.exit_code != EXIT_OTHER_FAILED:
                    raise
                followed = followed or error
        if followed is not None:
            raise followed
    finally:  # also where the notebook is interrupted
        for process in context.processes:
            process.kill()
            process.join()
        for thread in shows:
            thread.join(GRACE_SECONDS)  # what the processes have left behind may hold a pipe


def _show(reader: int, stream: Any) -> None:
    """Copy what comes from a pipe to a stream of the notebook, until nobody writes to it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with open(reader, "rb", buffering=0) as pipe:
        while data := pipe.read(1 << 16):
            stream.write(decoder.decode(data))
            stream.flush()


def _be_child(
    local: int,
    first: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    environment: Mapping[str, str],
    writers: Sequence[int],
) -> None:
    """Run `function` as one of the processes."""
    gc.freeze()  # an old process group of the notebook could wait here for threads it had there
    os.environ.update(environment, RANK=str(first + local), LOCAL_RANK=str(local))
    for number, writer in enumerate(writers, 1):
        os.dup2(writer, number)
        os.close(writer)
    # Those of a notebook belong to threads that a fork does not have.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)  # the others of the pool were not forked either
    try:
        function(*args)
        if Processes._live is not None:
            Processes._live.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except Exception as error:
        live = Processes._live
        if live is not None and live.watch is not None:
            live.watch.fail_for_good(error)  # else the others would say that it is just gone
        raise


@contextmanager
def variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside; these are as before at the end."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _refuse_started() -> None:
    require_fork("`notebook_launcher`", "Pass `num_processes=1`, or start a script by `torchrun`.")
    with variables(ASK_THE_DRIVER):
        is_used = forbids_fork()
    if is_used:
        raise ConfigError(
            "The accelerator is in use in this notebook, and a forked process cannot use it then. "
            "Restart the kernel, and touch it (`model.to(...)`, `Accelerator()`) only inside the "
            "function."
        )
    if torch.distributed.is_initialized():
        raise ConfigError(
            "This notebook has a process group, which forked processes would share. Restart the "
            "kernel, and make groups only inside the function."
        )
