"""Start processes from a notebook."""

import codecs
import gc
import multiprocessing
import os
import secrets
import selectors
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from trainkit.basics.device import accelerator_count, forbids_fork
from trainkit.basics.launch_environment import MIXED_PRECISIONS
from trainkit.distributed import Processes
from trainkit.distributed.group import SECRET
from trainkit.distributed.rendezvous import INIT_METHOD
from trainkit.errors import ConfigError, DistributedError

__all__ = ["notebook_launcher"]

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
        mixed_precision: What `Accelerator()` takes by default: "no", "fp16" or "bf16".
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
    count = max(1, accelerator_count()) if num_processes is None else num_processes
    if count < 1:
        raise ConfigError(f"`num_processes` must be at least 1, but is {count}.")
    if mixed_precision not in MIXED_PRECISIONS:
        raise ConfigError(
            f"`mixed_precision` must be one of {', '.join(MIXED_PRECISIONS)}, but is "
            f"{mixed_precision!r}."
        )
    environment = {"TRAINKIT_MIXED_PRECISION": mixed_precision}
    if count * num_nodes == 1:
        _run_here(function, args, environment)
        return
    _refuse_started()
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
        family = _Family()
        try:
            for local in range(count):
                ranks = {"RANK": str(node_rank * count + local), "LOCAL_RANK": str(local)}
                family.start(function, args, {**environment, **ranks})
            family.watch()
        finally:
            family.end()


@dataclass(slots=True, eq=False)
class _Child:
    """A process: what it prints, and how it ended."""

    rank: int
    process: Any
    outputs: dict[int, Any]  # a stream of the notebook and a decoder, by what to read from
    verdict: int  # what its last words are read from
    words: bytes = b""


class _Family:
    """The processes of one call."""

    def __init__(self) -> None:
        self._children: list[_Child] = []
        self._context = multiprocessing.get_context("fork")

    def start(
        self, function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]
    ) -> None:
        """Fork a process that runs `function`."""
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [os.pipe() for _ in range(3)]
        writers = [writer for _, writer in pipes]
        process = self._context.Process(
            target=_be_child, args=(function, args, environment, writers), daemon=False
        )
        try:
            process.start()
        finally:
            for writer in writers:
                os.close(writer)
        make = codecs.getincrementaldecoder("utf-8")
        streams = {pipes[0][0]: sys.stdout, pipes[1][0]: sys.stderr}
        outputs = {reader: (stream, make("replace")) for reader, stream in streams.items()}
        rank = int(environment["RANK"])
        self._children.append(_Child(rank, process, outputs, pipes[2][0]))

    def watch(self) -> None:
        """Show what the processes print until all have ended.

        Raises:
            DistributedError: One has failed; the others are given a moment, and are then ended.
        """
        selector = selectors.DefaultSelector()
        for child in self._children:
            for reader in (*child.outputs, child.verdict):
                selector.register(reader, selectors.EVENT_READ, child)
        failed: _Child | None = None
        deadline: float | None = None
        while selector.get_map() and (deadline is None or time.monotonic() < deadline):
            for key, _ in selector.select(0.1):
                data = os.read(key.fd, 1 << 16)
                _take(key.data, key.fd, data)
                if data:
                    continue
                selector.unregister(key.fd)
                if key.fd == key.data.verdict and key.data.words != b"+" and failed is None:
                    failed, deadline = key.data, time.monotonic() + GRACE_SECONDS
        selector.close()
        if failed is not None:
            raise self._error(failed)

    def end(self) -> None:
        """End the processes that still run, and give everything back."""
        for child in self._children:
            if child.process.is_alive() and child.words != b"+":
                child.process.kill()
            child.process.join()
            for reader in (*child.outputs, child.verdict):
                os.close(reader)

    def _error(self, failed: _Child) -> DistributedError:
        if not failed.words:
            failed.process.join(GRACE_SECONDS)
            code = failed.process.exitcode
            what = f"ended without a word, exit code {code}" if code is not None else "fell silent"
            return DistributedError(f"Process {failed.rank} {what}.")
        text = failed.words.decode("utf-8", "replace").rstrip()
        return DistributedError(f"Process {failed.rank} raised:\n\n{text}")


def _take(child: _Child, reader: int, data: bytes) -> None:
    if reader == child.verdict:
        child.words += data
        return
    stream, decoder = child.outputs[reader]
    text = decoder.decode(data, final=not data)
    if text:
        stream.write(text)
        stream.flush()


def _be_child(
    function: Callable[..., Any],
    args: Sequence[Any],
    environment: Mapping[str, str],
    writers: Sequence[int],
) -> None:
    """Run `function` as one of the processes, and leave the last words."""
    gc.freeze()  # an old process group of the notebook could wait here for threads it had there
    os.environ.update(environment)
    for number, writer in enumerate(writers[:2], 1):
        os.dup2(writer, number)
        os.close(writer)
    # Those of a notebook belong to threads that a fork does not have.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)  # the others of the pool were not forked either
    words = b"+"
    try:
        function(*args)
        if Processes._live is not None:
            Processes._live.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except BaseException as error:
        if not isinstance(error, SystemExit):
            words = traceback.format_exc().encode("utf-8", "replace")
        elif error.code not in (None, 0):
            words = f"SystemExit: {error.code}".encode()
        live = Processes._live
        if words != b"+" and live is not None and live.watch is not None:
            live.watch.fail_for_good(error)  # else the others would say that it is just gone
    sys.stdout.flush()
    sys.stderr.flush()
    with open(writers[2], "wb") as verdict:
        verdict.write(words)
    os._exit(0 if words == b"+" else 1)


def _run_here(
    function: Callable[..., Any], args: Sequence[Any], environment: Mapping[str, str]
) -> None:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        function(*args)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _refuse_started() -> None:
    if forbids_fork():
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
